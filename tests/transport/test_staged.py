"""MPI gets nothing that a GPU has not written, and no order of waits deadlocks the ranks.

The GPU is `late.Late`; the messages are real.
"""

from __future__ import annotations

from typing import cast

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

import distconv as dc
from distconv.transport.interface import Transport
from distconv.transport.mpi import MPICommunicator, MPITransport
from distconv.transport.staged import (
    LaunchQueue,
    PinnedCopies,
    StagedTransport,
    takes_device_memory,
)
from tests.support.late import Late
from tests.support.serial import deviation
from tests.support.streams import Stream, replace_streams

WORLD = MPI.COMM_WORLD
ALL = MPICommunicator(WORLD)
RANKS = [2, 3, 4]
# More than MPI sends before the receiver asks for it.
SIZE = 2**17


def staged(gpu: Late, direct: bool = False, queue: LaunchQueue | None = None) -> StagedTransport:
    mpi, copies = MPITransport(MPICommunicator(WORLD.Dup())), cast(PinnedCopies, gpu)
    return StagedTransport(mpi, copies, queue or LaunchQueue(), direct)


class Ring:
    """An exchange in which every rank sends `value` on to the next."""

    def __init__(self, transport: Transport, value: Tensor, tag: int):
        before, after = (WORLD.rank - 1) % WORLD.size, (WORLD.rank + 1) % WORLD.size
        self.landing = torch.full_like(value, -1)
        self.request = transport.exchange([(before, self.landing)], [(after, value)], tag)

    def arrived(self) -> float:
        self.request.wait()
        assert self.landing.min() == self.landing.max()
        return self.landing[0].item()


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("direct", [False, True])
def test_what_is_written_late_is_what_is_sent(direct: bool) -> None:
    gpu = Late()
    value = torch.full((SIZE,), -2.0)
    gpu.later(lambda: value.fill_(WORLD.rank))
    ring = Ring(staged(gpu, direct), value, 1)
    assert value[0] == -2
    assert ring.arrived() == (WORLD.rank - 1) % WORLD.size


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("direct", [False, True])
def test_ranks_may_wait_for_exchanges_in_different_orders(direct: bool) -> None:
    transport = staged(Late(), direct)
    rings = [Ring(transport, torch.full((SIZE,), 10.0 * i + WORLD.rank), i) for i in range(3)]
    for i in (0, 1, 2) if WORLD.rank % 2 else (2, 1, 0):
        assert rings[i].arrived() == 10 * i + (WORLD.rank - 1) % WORLD.size


@pytest.mark.parallel(RANKS)
def test_ranks_may_wait_for_exchanges_of_several_grids_in_different_orders() -> None:
    gpu, queue = Late(), LaunchQueue()
    rings = [
        Ring(staged(gpu, queue=queue), torch.full((SIZE,), 10.0 * i + WORLD.rank), 1)
        for i in range(2)
    ]
    for i in (0, 1) if WORLD.rank % 2 else (1, 0):
        assert rings[i].arrived() == 10 * i + (WORLD.rank - 1) % WORLD.size


@pytest.mark.parallel(RANKS)
def test_ranks_may_wait_for_reductions_and_exchanges_in_different_orders() -> None:
    transport, group = staged(Late()), MPICommunicator(WORLD.Dup())
    totals = [torch.full((SIZE,), float(WORLD.rank + i)) for i in range(2)]
    first = transport.all_reduce(totals[0], group)
    ring = Ring(transport, torch.full((SIZE,), float(WORLD.rank)), 1)
    second = transport.all_reduce(totals[1], group)
    for request in (first, ring.request, second)[:: 1 if WORLD.rank % 2 else -1]:
        request.wait()
    assert ring.landing[-1] == (WORLD.rank - 1) % WORLD.size
    for i, total in enumerate(totals):
        assert torch.equal(total, torch.full((SIZE,), sum(r + i for r in range(WORLD.size)) * 1.0))
    group.mpi.Free()


@pytest.mark.parallel(RANKS)
def test_what_others_wait_for_is_sent_before_a_collective() -> None:
    transport, group = staged(Late()), MPICommunicator(WORLD.Dup())
    ring = Ring(transport, torch.full((SIZE,), float(WORLD.rank)), 1)
    if WORLD.rank % 2:
        ring.request.wait()
    gathered = transport.all_gather(torch.tensor([float(WORLD.rank)]), group)
    assert gathered.flatten().tolist() == list(range(WORLD.size))
    if not WORLD.rank % 2:
        ring.request.wait()
    assert ring.landing[0] == (WORLD.rank - 1) % WORLD.size
    value = torch.full((3,), float(WORLD.rank))
    transport.broadcast(value, group)
    assert value.tolist() == [0.0] * 3
    group.mpi.Free()


@pytest.mark.parallel(RANKS)
def test_half_types_are_added_up_in_float32() -> None:
    value = torch.full((SIZE,), 1 / 3, dtype=torch.bfloat16)
    expected = (value.float() * WORLD.size).bfloat16()
    group = MPICommunicator(WORLD.Dup())
    staged(Late()).all_reduce(value, group).wait()
    assert torch.equal(value, expected)
    group.mpi.Free()


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("method", ["overlapped", "assembled"])
@pytest.mark.parametrize("direct", [False, True])
def test_a_step_uses_nothing_that_is_still_on_its_way(
    direct: bool, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = dc.ProcessGrid(height=-1)
    monkeypatch.setitem(vars(grid), "transport", staged(Late(), direct))
    torch.manual_seed(0)
    serial = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 6, 5, padding=2, padding_mode="circular"),
        nn.AvgPool2d(3, 1, 1),
        nn.ConvTranspose2d(6, 4, 2, 2),
    ).double()
    model = nn.Sequential(*serial)
    copied = {name: p.clone() for name, p in serial.state_dict().items()}
    x, y = torch.randn(2, 3, 20, 12).double(), torch.randn(2, 4, 20, 12).double()
    wanted = [_step(serial, x, y) for _ in range(2)]
    serial.load_state_dict(copied)
    dc.parallelize(model, grid, bucket_bytes=512)
    with dc.method(method):
        cut = [dc.distribute_tensor(t, grid) for t in (x, y)]
        found = [_step(model, *cut) for _ in range(2)]
    for (loss, gradients), (expected, serially) in zip(found, wanted, strict=True):
        assert abs(loss - expected) < 1e-12 * abs(expected)
        assert all(deviation(a, b) < 1e-10 for a, b in zip(gradients, serially, strict=True))


def _step(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, list[Tensor]]:
    model.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parallel([1, 2, 3])
def test_copies_are_made_on_streams_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_streams(monkeypatch)
    monkeypatch.setattr(
        PinnedCopies, "host", lambda self, like: torch.empty_like(like)
    )  # not pinned
    used: list[Tensor] = []
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: used.append(tensor))
    copies = PinnedCopies(torch.device("cpu"))
    transport = StagedTransport(MPITransport(MPICommunicator(WORLD.Dup())), copies, LaunchQueue())
    value = torch.full((SIZE,), float(WORLD.rank))
    ring = Ring(transport, value, 1)
    assert ring.arrived() == (WORLD.rank - 1) % WORLD.size
    assert [t.data_ptr() for t in used] == [value.data_ptr(), ring.landing.data_ptr()]

    monkeypatch.setattr(Stream, "is_capturing", lambda self: True)
    for refused in (
        lambda: Ring(transport, value, 2),
        lambda: transport.all_gather(value, ALL),
        lambda: transport.broadcast(value, ALL),
        lambda: StagedTransport(MPITransport(ALL), copies, LaunchQueue(), True).exchange(
            [], [(WORLD.rank, value)], 3
        ),
    ):
        with pytest.raises(RuntimeError, match="capture steps on a grid with transport='torch'"):
            refused()


@pytest.mark.parallel([1, 2])
def test_the_environment_tells_whether_mpi_takes_memory_of_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DISTCONV_GPU_AWARE_MPI", "1")
    assert takes_device_memory(ALL, "cuda")
    # It has to be so everywhere.
    monkeypatch.setenv("DISTCONV_GPU_AWARE_MPI", "0" if WORLD.rank == WORLD.size - 1 else "1")
    assert not takes_device_memory(ALL, "cuda")
    monkeypatch.delenv("DISTCONV_GPU_AWARE_MPI")
    assert len(set(WORLD.allgather(takes_device_memory(ALL, "cuda")))) == 1
    if WORLD.rank == 0:
        monkeypatch.setenv("DISTCONV_GPU_AWARE_MPI", "yes")
    with pytest.raises(ValueError, match="DISTCONV_GPU_AWARE_MPI='yes' on rank 0; set it to 1"):
        takes_device_memory(ALL, "cuda")
