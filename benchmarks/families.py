"""Bytes and memory of small networks of many families, over their inputs and over serial torch.

`mpiexec -n 4 python -m benchmarks families` prints rows, on a grid of 2 x 2 ranks for planes and
volumes. The bytes are those that arrive at the busiest rank in one step; a backward pass counts
without the sums of parameters' gradients, which depend on the network's size alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.family_cases import FAMILIES, Family, input_of
from benchmarks.measuring.memory import peak_of
from benchmarks.measuring.report import Row, of_bytes
from benchmarks.measuring.settings import Settings, by
from distconv.grid.process_grid import ProcessGrid
from distconv.model.parallelize import parallelize
from distconv.planning.scaling import sleep_until_all_are_here
from distconv.tensor.dist_tensor import distribute_tensor
from distconv.tools.traffic import count_traffic


def families(settings: Settings, cases: tuple[Family, ...] = FAMILIES) -> Iterator[Row]:
    """Yield rows of bytes and of peak memory for each family. All ranks call it."""
    for family in cases:
        grid = _grid(settings, len(family.shape))
        make = partial(_step, family, grid)
        step = make()
        step()
        with count_traffic() as traffic:
            step()
        sums = sum(entry.bytes for entry in traffic.entries if entry.layer == "gradients")
        own = traffic.forward, traffic.backward - sums, peak_of(make).whole
        forward, backward, peak = (max(grid.comm.allgather(n)) for n in own)
        alone = peak_of(partial(_step, family, None)) if grid.rank == 0 else None
        sleep_until_all_are_here(grid.comm)
        serial = grid.comm.bcast(alone).whole
        row = "families", family.name, settings.configuration(grid, by(family.shape))
        size = input_of(family).nbytes
        yield of_bytes(row, "bytes of the forward pass over the input", forward, size)
        yield of_bytes(row, "bytes of the backward pass over the input", backward, size)
        yield of_bytes(row, "peak over serial peak", peak, serial)


def _grid(settings: Settings, ndim: int) -> ProcessGrid:
    """Return the grid for tensors of `ndim` dimensions, of 2 x 2 ranks by default on four."""
    if settings.extents is None and settings.ranks == 4 and ndim > 3:
        first = "depth" if ndim == 5 else "width"
        extents: dict[str, Any] = {first: 2, "height": 2}
        return ProcessGrid(**extents, device="cpu")
    return settings.grid(ndim)


def _step(family: Family, grid: ProcessGrid | None) -> Callable[[], None]:
    """Return a step of a network, distributed over a grid or serial."""
    torch.manual_seed(0)
    network, x = family.make(), input_of(family)
    if grid is not None:
        network, x = parallelize(network, grid), distribute_tensor(x, grid)
    x.requires_grad_()

    def step() -> None:
        x.grad = None
        network.zero_grad()
        network(x).square().sum().backward()

    return step
