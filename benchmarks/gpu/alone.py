"""One rank over plain torch: time on the GPU, time of the host, and memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.gpu.cases import Case, Step, cut, module, plain
from benchmarks.gpu.clock import alternate, peak_of
from benchmarks.measuring.plain import CHANNELS_LAST, DEFAULT, plain_forms
from benchmarks.measuring.report import Row, of_bytes, over
from benchmarks.measuring.settings import by
from distconv import ProcessGrid, parallelize


def on_grid(case: Case, grid: ProcessGrid) -> Step:
    """Return a step of the case as a user has it; all ranks of the grid call it."""
    parallel = parallelize(module(case, grid.device), grid)
    return case.step(parallel, *cut(case, grid, grid.device))


def alone(case: Case, grid: ProcessGrid, seconds: float) -> Iterator[Row]:
    """Yield time, time of the host and peak memory of a grid of one rank, over plain torch's."""
    makes = partial(on_grid, case, grid), partial(plain, case, grid, grid.device)
    times = alternate(grid.device, [make() for make in makes], seconds)
    (mine, mine_host), (bound, bound_host) = times
    row = "alone", case.name, f"1 rank, {by(case.shape)}, {grid.transport.name}"
    yield over(row, "over plain torch", mine, bound, case.target)
    yield over(row, "host, over plain torch", mine_host, bound_host, None)
    yield of_bytes(row, "peak memory", *(peak_of(grid.device, make) for make in makes))


def formats(case: Case, grid: ProcessGrid, seconds: float) -> Iterator[Row]:
    """Yield the time of plain torch with channels last over that with channels first.

    Below 1, DISTCONV_CHANNELS_LAST=1 is worth setting on this device.
    """
    x, y = cut(case, grid, grid.device)
    make = partial(module, case, grid.device)
    forms = plain_forms(make, (x.shard, y.shard), case.step)
    steps = [forms[CHANNELS_LAST], forms[DEFAULT]]
    last_times, first_times = alternate(grid.device, steps, seconds)
    row = "alone", case.name, f"1 rank, {by(case.shape)}, plain torch"
    yield over(row, "channels last over first", last_times.device, first_times.device, None)
