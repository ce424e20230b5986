"""Messages by torch's own process groups, here gloo's, which match and add up as MPI's do."""

from __future__ import annotations

import random
import socket
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI

import distconv as dc
from distconv.grid import communicators
from distconv.grid.ranks import world
from distconv.transport.interface import Transport
from distconv.transport.torch import open_store
from tests.grid.test_abort import job

WORLD = MPI.COMM_WORLD
RANKS = [1, 2, 3, 4]


def transport() -> Transport:
    """Return the transport of all ranks."""
    return communicators.transport(tuple(range(WORLD.size)), "torch", ("cpu",) * WORLD.size)


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_messages_arrive_whatever_the_order_of_waiting(dtype: torch.dtype) -> None:
    carrier = transport()
    rng, mine = random.Random(0), random.Random(WORLD.rank)
    for i in range(10):
        flights = []
        for _ in range(3):
            # Some of them have no elements, and some go from a rank to itself.
            sizes = [[rng.randrange(4) ** 5 for _ in range(WORLD.size)] for _ in range(WORLD.size)]
            arriving = [
                (r, carrier.empty((sizes[r][WORLD.rank],), torch.empty(0, dtype=dtype)))
                for r in range(WORLD.size)
            ]
            leaving = [
                (r, torch.full((n,), 10.0 * i + WORLD.rank).to(dtype))
                for r, n in enumerate(sizes[WORLD.rank])
            ]
            flights.append((arriving, carrier.exchange(arriving, leaving, carrier.next_tag())))
            del leaving
        for arriving, request in mine.sample(flights, 3):
            request.wait()
            for rank, landing in arriving:
                assert landing.eq(torch.tensor(10.0 * i + rank).to(dtype)).all()


@pytest.mark.parallel([2])
def test_ranks_of_one_machine_meet_though_it_does_not_know_its_name(monkeypatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "no-such-machine.invalid")
    store = open_store(world())
    assert store is not None
    store.set(f"rank {WORLD.rank}", "here")
    assert store.get(f"rank {1 - WORLD.rank}") == b"here"
    # Nobody outside can reach the store, and whoever reaches it does not know its keys.
    port = store.underlying_store.port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port)).close()
    stranger = torch.distributed.TCPStore("127.0.0.1", port, wait_for_workers=False)
    assert not stranger.check([f"rank {WORLD.rank}"])
    WORLD.barrier()


@pytest.mark.parallel([2])
def test_a_single_element_travels_whatever_its_stride() -> None:
    carrier, other = transport(), 1 - WORLD.rank
    element = torch.arange(8).reshape(4, 2)[WORLD.rank : WORLD.rank + 1, 0]
    assert element.stride() == (2,) and element.is_contiguous()
    into = carrier.empty((1,), element)
    carrier.exchange([(other, into)], [(other, element)], carrier.next_tag()).wait()
    assert into.item() == 2 * other


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    ],
)
@pytest.mark.parametrize("size", [0, 1, 7, 70_001])
def test_all_types_are_added_up(dtype: torch.dtype, size: int) -> None:
    group = communicators.communicator(tuple(range(WORLD.size)), "sums")
    each = [(torch.arange(size) % 5 + r).to(dtype) for r in range(WORLD.size)]
    total = each[WORLD.rank].clone()
    transport().all_reduce(total, group).wait()
    expected = torch.stack(each).to(dtype if dtype.is_complex else torch.float64).sum(0)
    assert torch.equal(total, expected.ne(0) if dtype == torch.bool else expected.to(dtype))


@pytest.mark.parallel([1, 2])
def test_a_type_that_cannot_be_added_up_is_refused() -> None:
    group = communicators.communicator(tuple(range(WORLD.size)), "sums")
    with pytest.raises(TypeError, match="gloo cannot sum torch.uint16; convert"):
        transport().all_reduce(torch.zeros(1, dtype=torch.uint16), group)


@pytest.mark.parallel([2, 3, 4])
def test_groups_have_their_ranks_in_any_order_and_meet_no_others() -> None:
    carrier = transport()
    members = tuple(r for r in range(WORLD.size) if r % 2 == WORLD.rank % 2)[::-1]
    groups = [communicators.communicator(members, purpose) for purpose in ("one", "other")]
    for group in groups:
        gathered = carrier.all_gather(torch.full((2, 30), WORLD.rank), group)
        assert gathered[:, 1, 29].tolist() == list(members)
    value = torch.full((40,), 1.0 + WORLD.rank)
    carrier.broadcast(value, groups[0])
    assert value.eq(1 + members[0]).all()
    # Sums of several purposes under way at the same time, and finished in any order.
    totals = [value.clone() * (1 + i) for i in range(2)]
    requests = [carrier.all_reduce(t, g) for t, g in zip(totals, groups, strict=True)]
    for request in requests[:: 1 if WORLD.rank % 2 else -1]:
        request.wait()
    for i, total in enumerate(totals):
        assert total.eq((1 + i) * len(members) * (1 + members[0])).all()


@pytest.mark.parallel([2, 3])
def test_memory_is_free_as_soon_as_a_collective_is_complete() -> None:
    carrier = transport()
    group = communicators.communicator(tuple(range(WORLD.size)), "sums")
    addresses = set()
    for i in range(100):
        # Memory of messages is used again when nothing refers to it any more.
        total = carrier.empty((77777,), torch.empty(0)).fill_(i)
        addresses.add(total.data_ptr())
        carrier.all_reduce(total, group).wait()
        carrier.broadcast(total, group)
        gathered = carrier.all_gather(total, group)
        assert gathered.eq(i * WORLD.size).all()
        del total
    assert len(addresses) == 1


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("method", ["overlapped", "assembled"])
def test_halos_are_bitwise_those_of_mpi(method: str) -> None:
    grids = [dc.ProcessGrid(height=-1, transport=name) for name in ("mpi", "torch")]
    assert [grid.transport.name for grid in grids] == ["mpi", "torch"]
    rng = random.Random(1)
    for _ in range(8):
        kernel, channels = rng.choice([1, 3, 5, 7]), rng.randrange(1, 9)
        shape = 2, channels, rng.randrange(kernel, 40), rng.randrange(kernel, 60)
        generator = torch.Generator().manual_seed(rng.randrange(2**30))
        weight = torch.randn(5, channels, kernel, kernel, generator=generator)
        x = torch.randn(shape, generator=generator)
        results = []
        for grid in grids:
            cut = dc.distribute_tensor(x, grid).requires_grad_()
            with dc.method(method):
                y = F.conv2d(F.max_pool2d(cut, 3, 1, 1), weight, padding=kernel // 2)
                (gradient,) = torch.autograd.grad((y * y).to_local(grad="part").sum(), cut)
            results.append((y.to_local(), gradient.to_local()))
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs)


def ended(tmp_path: Path, body: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return job(tmp_path, body, DISTCONV_TRANSPORT="torch", **variables)


def test_a_job_by_torch_ends_in_silence(tmp_path: Path) -> None:
    end = ended(tmp_path, "assert grid.transport.name == 'torch' and x.sum().item() > 0")
    assert (end.returncode, end.stdout, end.stderr) == (0, "", "")


def test_two_ranks_that_call_different_operators_are_told_both(tmp_path: Path) -> None:
    body = "(torch.flip(x, (2,)) if grid.rank else torch.roll(x, 1, 2)).sum()"
    end = ended(tmp_path, body, DISTCONV_DEBUG="1")
    assert end.returncode != 0
    assert "flip" in end.stderr and "roll" in end.stderr and "the ranks differ" in end.stderr
