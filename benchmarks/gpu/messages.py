"""Messages between two processes, which may share a GPU, by each transport; time against size.

The host times several calls and the wait for the GPU behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from benchmarks.gpu.alone import on_grid
from benchmarks.gpu.cases import Case
from benchmarks.gpu.waits import waits
from benchmarks.halo import exchange, plan_of
from benchmarks.measuring.report import Row, over
from benchmarks.measuring.turns import alternate
from distconv import DistTensor, ProcessGrid
from distconv.device.kinds import wait_for_device
from distconv.geometry.layout import default_cuts
from distconv.planning.scaling import Contender
from distconv.planning.table import byte_size
from distconv.tensor.dist_tensor import local_box

TRANSPORTS = "torch", "mpi", "nccl"
"""The default comes first, as nothing is measured after a transport has failed."""
SIZES = tuple(2**n for n in (10, 14, 18, 20, 22, 24, 26))
"""Bytes of a message."""
CHANNELS, THICKNESS = 16, 8
"""Channels of the planes whose halos travel, and rows of every rank's block."""
CALLS = 10
"""Calls that are given to the GPU before the host waits for it."""


def by_transport(
    name: str, device: str | None, measure: Callable[[ProcessGrid], Iterator[Row | str]]
) -> Iterator[Row | str]:
    """Yield the measurements on a grid of two ranks, or why they cannot have the transport."""
    try:
        grid = ProcessGrid(height=2, device=device, transport=name)
    except ValueError as error:
        yield f"{name}: not here. {error}"
    else:
        yield from measure(grid)


def step(grid: ProcessGrid, case: Case) -> Iterator[str]:
    """Yield where the host waits in a step."""
    yield waits(f"{case.name}, {grid.size} ranks, {grid.transport.name}", on_grid(case, grid))


def messages(grid: ProcessGrid, sizes: Sequence[int], seconds: float) -> Iterator[Row]:
    """Yield two rows for messages of each size each way, bare and as halos."""
    for nbytes in sizes:
        yield from _rows(grid, nbytes, seconds)


def _rows(grid: ProcessGrid, nbytes: int, seconds: float) -> Iterator[Row]:
    bare, halo = _bare(grid, nbytes), _halo(grid, nbytes)
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=grid.device) for _ in range(2))
    runs = bare, halo, partial(target.copy_, source)
    sides = [Contender(partial(_several, run, grid.device)) for run in runs[:2]]
    sides.append(Contender(partial(_several, runs[2], grid.device), ranks=1))
    *each, copy = ([t / CALLS for t in times] for times in alternate(grid.comm, sides, seconds))
    row = "messages", f"{grid.transport.name}, {byte_size(nbytes)} each way", f"{grid.size} ranks"
    for what, times in zip(("a message", "a halo, packed"), each, strict=True):
        yield over(row, f"{what}, over a copy of as many bytes", times, copy, None)


def _several(run: Callable[[], object], device: torch.device) -> None:
    for _ in range(CALLS):
        run()
    wait_for_device(device)


def _bare(grid: ProcessGrid, nbytes: int) -> Callable[[], None]:
    """Return an exchange of contiguous memory with the other rank."""
    peer = 1 - grid.rank
    like = torch.zeros(nbytes // 4, device=grid.device)
    leaving = grid.transport.empty((like.numel(),), like).copy_(like)

    def run() -> None:
        arriving = grid.transport.empty((like.numel(),), like)
        tag = grid.transport.next_tag()
        grid.transport.exchange([(peer, arriving)], [(peer, leaving)], tag).wait()

    return run


def _halo(grid: ProcessGrid, nbytes: int) -> Callable[[], None]:
    """Return the halo exchange of a 3x3 convolution, a row each way."""
    shape = 1, CHANNELS, THICKNESS * grid.size, nbytes // (4 * CHANNELS)
    shard = torch.randn(local_box(shape, grid).shape, device=grid.device)
    x = DistTensor(shard, shape, default_cuts(4, grid.topology), grid)
    return exchange(x, plan_of(x))
