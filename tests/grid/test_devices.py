"""All ranks agree on what they compute on and how messages travel; these tests need no GPU."""

from __future__ import annotations

import os

import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv.grid import communicators
from distconv.grid.devices import Offer, choose, make_offer
from distconv.transport.interface import Transport

WORLD = MPI.COMM_WORLD
NODE, OTHER = tuple("abcd"), tuple("efgh")


def offers(*gpus: tuple[str, ...], **asked: object) -> list[Offer]:
    """Offers of ranks that see these GPUs."""
    default = {"device": None, "transport": None}
    kinds = ["cuda" if g else "cpu" for g in gpus]
    given = zip(gpus, kinds, strict=True)
    return [Offer(**default | {"gpus": g, "kind": kind} | asked) for g, kind in given]


@pytest.mark.parallel([1])
def test_the_ranks_of_a_node_take_its_gpus_in_turn() -> None:
    choice = choose(offers(NODE, OTHER, NODE, NODE, OTHER))
    assert choice == (("cuda:0", "cuda:0", "cuda:1", "cuda:2", "cuda:1"), "torch", None)


@pytest.mark.parallel([1])
def test_ranks_take_what_the_fewest_others_have() -> None:
    # The same GPU by other numbers is the same GPU.
    assert choose(offers(("a", "b"), ("b", "a"))).devices == ("cuda:0", "cuda:0")
    assert choose(offers(("a",), ("a", "b"))).devices == ("cuda:0", "cuda:1")
    # A rank keeps what it has on another grid.
    choice = choose([*offers(NODE, NODE), *offers(NODE, device="cuda:0"), *offers(NODE)])
    assert choice == (("cuda:1", "cuda:2", "cuda:0", "cuda:3"), "torch", None)


@pytest.mark.parallel([1])
def test_ranks_that_share_gpus_use_mpi_and_say_so() -> None:
    choice = choose(offers(*[NODE[:2]] * 4))
    assert choice.devices == ("cuda:0", "cuda:1", "cuda:0", "cuda:1")
    assert choice.transport == "mpi"
    assert choice.notice == "4 ranks share 2 of 2 GPUs; start one rank for each GPU"
    kept = choose([Offer("cuda:1", None, NODE)] * 2).notice or ""
    assert "2 ranks share 1 of 4 GPUs; create the grid of all ranks before" in kept


@pytest.mark.parallel([1])
def test_a_rank_computes_on_what_it_is_asked_to() -> None:
    two = Offer("cuda:3", None, NODE), Offer("cuda:1", None, NODE)
    assert choose(two).devices == ("cuda:3", "cuda:1")
    assert choose([Offer("cpu", None)] * 2) == (("cpu", "cpu"), "mpi", None)
    assert choose(offers((), ())) == (("cpu", "cpu"), "mpi", None)
    assert choose(offers(NODE, NODE, transport="mpi")).transport == "mpi"
    choice = choose([*offers(NODE), *offers(NODE, missing={"torch": "no NCCL"})])
    assert choice.transport == "mpi"
    assert choice.notice == (
        "messages between GPUs use MPI, mostly staged through the host: no NCCL (rank 1)"
    )
    assert choose(offers(NODE, NODE, transport="mpi")).notice is None


@pytest.mark.parallel([1])
def test_nccl_takes_ranks_that_share_a_gpu_where_it_is_told_to() -> None:
    assert choose(offers(("a",), ("a",), may_share=True)).transport == "torch"
    assert choose([*offers(("a",), may_share=True), *offers(("a",))]).transport == "mpi"


@pytest.mark.parallel([1])
def test_accelerators_of_any_kind_are_taken_where_all_ranks_have_the_same() -> None:
    intel = offers(("a",), ("b",), kind="xpu")
    assert choose(intel) == (("xpu:0", "xpu:0"), "torch", None)
    with pytest.raises(ValueError, match="device is 'cuda' on rank 2 and 'xpu' on rank 0"):
        choose([*intel, *offers(("c",))])


@pytest.mark.parallel([1])
def test_ranks_that_mpi_has_not_started_use_torch() -> None:
    by_torch = {"missing": {"mpi": "start them with mpiexec"}}
    assert choose(offers((), (), **by_torch)).transport == "torch"
    assert choose(offers(("a",), ("b",), **by_torch)).transport == "torch"
    with pytest.raises(ValueError, match="'torch': ranks 0 and 1 share a GPU.*'mpi': start them"):
        choose(offers(("a",), ("a",), **by_torch))


@pytest.mark.parallel([1])
def test_the_environment_says_by_what_messages_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCONV_TRANSPORT", "torch")
    assert make_offer("cpu", None, None).transport == "torch"
    assert make_offer("cpu", "mpi", None).transport == "mpi"
    monkeypatch.setenv("DISTCONV_TRANSPORT", "tcp")
    with pytest.raises(ValueError, match="DISTCONV_TRANSPORT='tcp' is unknown; choose 'torch'"):
        make_offer("cpu", None, None)


@pytest.mark.parallel([1])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (offers(NODE, ()), "device is 'cpu' on rank 1 and 'cuda' on rank 0"),
        (
            [Offer(None, None), Offer(None, "mpi")],
            "transport is 'mpi' on rank 1 and None on rank 0",
        ),
        (offers((), transport="nccl"), "it requires GPUs, but the ranks compute on CPUs"),
        (offers((), device="cuda"), "device='cuda', and rank 0 sees 0 GPUs"),
        (
            [Offer("cuda", None, NODE), Offer("cuda:4", None, NODE)],
            "device='cuda:4', and rank 1 sees 4",
        ),
        (offers(("a",), ("b",), ("a",), transport="nccl"), "ranks 0 and 2 share a GPU"),
        (
            [
                *offers(NODE, transport="nccl"),
                *offers(NODE, transport="nccl", missing={"nccl": "no cupy"}),
            ],
            r"transport='nccl': no cupy \(rank 1\), or choose 'torch' or 'mpi'",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_way_out(given: list[Offer], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(given)


@pytest.mark.parallel([1, 2])
def test_a_grid_without_gpus_computes_on_the_cpu() -> None:
    grid = dc.ProcessGrid(height=-1)
    assert grid.device == torch.device("cpu")
    assert grid.transport.name == os.environ.get("DISTCONV_TRANSPORT", "mpi")
    assert grid == dc.ProcessGrid(height=-1, device="cpu")
    assert "GPU" not in repr(grid)


@pytest.mark.parallel([2, 3])
def test_a_transport_is_made_by_all_ranks_where_one_has_another_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(communicators, "PinnedCopies", torch.device)
    monkeypatch.setenv("DISTCONV_SELFTEST", "0")
    ranks = tuple(range(WORLD.size))

    def made(*last: str) -> Transport:
        devices = ("cuda:0",) * (WORLD.size - 1) + last
        return communicators.transport(ranks, "mpi", devices)

    first = made("cuda:1")
    assert made("cuda:0") is not first and made("cuda:1") is first


@pytest.mark.parallel([2, 3])
def test_a_tensor_on_a_device_of_another_kind_is_refused_on_all_ranks() -> None:
    grid = dc.ProcessGrid(height=-1)
    odd = grid.rank == 1
    x = torch.ones(1, 1, 2, 2, device="meta" if odd else "cpu")
    for make in (dc.DistTensor.from_local, dc.distribute_tensor):
        with pytest.raises(ValueError, match="the tensor of rank 1 is on meta") as error:
            make(x, grid)
        assert len(set(WORLD.allgather(str(error.value)))) == 1


@pytest.mark.parallel([1, 2])
def test_a_distributed_tensor_stays_on_the_devices_of_its_grid() -> None:
    x = dc.distribute_tensor(torch.ones(1, 1, 2, 2), dc.ProcessGrid(height=-1))
    assert x.to("cpu") is x
    for move in (lambda: x.to("meta"), lambda: torch.rand_like(x, device="meta")):
        with pytest.raises(dc.UnsupportedOperation, match="are on its devices, not on meta"):
            move()
