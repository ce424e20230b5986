"""Messages carry what the streams of GPUs have written, however late, and nothing is used early."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import distconv as dc
from distconv.device.kinds import accelerator
from distconv.device.streams import using
from distconv.geometry.topology import AXES
from distconv.transport.interface import Request
from tests.gpu.steps import RANKS, sleep

pytestmark = pytest.mark.gpu

SIZE = 2**18
SLOWLY = 2 * 10**7
"""Cycles of a GPU, about 10 ms."""


def wait_a_while(rng: random.Random) -> None:
    """Let the current stream sleep for up to a quarter of `SLOWLY`."""
    sleep(rng.randrange(SLOWLY // 4))


def exchange(grid: dc.ProcessGrid, value: Tensor) -> tuple[Tensor, Request]:
    """Send to the next rank, which is this one where there is no other."""
    before, after = (grid.rank - 1) % grid.size, (grid.rank + 1) % grid.size
    landing = grid.transport.empty(tuple(value.shape), value)
    messages = [(before, landing)], [(after, value)]
    return landing, grid.transport.exchange(*messages, grid.transport.next_tag())


@pytest.mark.parallel(RANKS)
def test_what_a_stream_writes_late_is_what_is_sent(grid: dc.ProcessGrid) -> None:
    value = torch.full((SIZE,), -1.0, device=grid.device)
    sleep(SLOWLY)
    value.fill_(grid.rank)
    landing, request = exchange(grid, value)
    request.wait()
    assert landing.eq((grid.rank - 1) % grid.size).all()


@pytest.mark.parallel(RANKS)
def test_what_is_sent_may_be_overwritten_and_freed_after_waiting(grid: dc.ProcessGrid) -> None:
    incoming = []
    for i in range(50):
        value = torch.full((SIZE,), float(i), device=grid.device)
        landing, request = exchange(grid, value)
        request.wait()
        value.fill_(-1)
        del value
        incoming.append(landing)
    assert all(landing.eq(i).all() for i, landing in enumerate(incoming))


@pytest.mark.parallel(RANKS)
def test_streams_and_ranks_that_are_late_change_nothing(grid: dc.ProcessGrid) -> None:
    rng, mine = random.Random(0), random.Random(grid.rank)
    side = torch.Stream(device=grid.device)
    for i in range(30):
        size = rng.randrange(1, SIZE)
        wait_a_while(mine)
        values = [torch.arange(size, device=grid.device) * (j + i + grid.rank) for j in range(3)]
        flights = [exchange(grid, value) for value in values]
        del values
        # What the allocator takes for free is written to, on this stream and on another.
        noise = [torch.full((size,), -1, device=grid.device) for _ in range(3)]
        with using(side):
            noise += [torch.full((size,), -1, device=grid.device) for _ in range(3)]
        before = (grid.rank - 1) % grid.size
        for j in mine.sample(range(3), 3):
            landing, request = flights[j]
            request.wait()
            assert torch.equal(landing, torch.arange(size, device=grid.device) * (j + i + before))


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
        *(torch.uint8, torch.int16, torch.int64, torch.bool),
    ],
)
def test_reductions_add_up_what_is_written_late(grid: dc.ProcessGrid, dtype: torch.dtype) -> None:
    total = torch.zeros(SIZE, dtype=dtype, device=grid.device)
    sleep(SLOWLY)
    total.copy_(torch.arange(SIZE, device=grid.device) % 7 + grid.rank)
    group = grid.communicator(AXES)
    grid.transport.all_reduce(total, group).wait()
    each, wide = torch.arange(SIZE) % 7, dtype.to_complex() if dtype.is_complex else torch.float64
    expected = sum((each + r).to(dtype).to(wide) for r in range(grid.size))
    wanted = expected.ne(0) if dtype == torch.bool else expected.to(dtype)
    assert torch.equal(total.cpu(), wanted)
    gathered = grid.transport.all_gather(torch.full((3,), grid.rank, device=grid.device), group)
    assert gathered[:, 0].tolist() == list(range(grid.size))
    value = torch.full((3,), grid.rank, device=grid.device)
    grid.transport.broadcast(value, group)
    assert value.tolist() == [0, 0, 0]


@pytest.mark.parallel(RANKS)
def test_the_gpu_of_a_rank_becomes_the_current_one() -> None:
    grid = dc.ProcessGrid(height=-1)
    assert grid.device.type == accelerator() and "with GPUs" in repr(grid)
    assert grid.device.index == torch.accelerator.current_device_index()
