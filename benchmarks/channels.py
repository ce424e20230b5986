"""One convolution with its channels cut, against the same with its rows cut, and against one rank.

A step is forward, backward to input and weights, and the sum of weight gradients over the ranks,
of which there is none where the weights are sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.layer import step_of
from benchmarks.measuring.report import Row, over, speedup
from benchmarks.measuring.settings import Settings, by, chain
from benchmarks.measuring.turns import alternate
from distconv.geometry.layout import Layout
from distconv.grid.process_grid import ProcessGrid
from distconv.layers import Conv2d
from distconv.model.parallelize import parallelize
from distconv.planning.scaling import Contender
from distconv.tensor.dist_tensor import distribute_tensor


class Case(NamedTuple):
    """A layer and its global input."""

    name: str
    make: Callable[[str], nn.Module]
    """The function that makes the layer for an algorithm, as `distconv.layers` calls it."""
    shape: tuple[int, ...]


CASES = (
    Case(
        "384 -> 384, 3x3, 16^2",
        lambda algorithm: Conv2d(384, 384, 3, padding=1, bias=False, parallel=algorithm),
        (4, 384, 16, 16),
    ),
    Case(
        "512 -> 128, 1x1, 28^2",
        lambda algorithm: Conv2d(512, 128, 1, bias=False, parallel=algorithm),
        (4, 512, 28, 28),
    ),
)


def channels(settings: Settings, cases: Sequence[Case] = CASES) -> Iterator[Row]:
    """Yield two rows for each case and algorithm; all ranks call it."""
    rows = chain("height")
    grids: dict[str, tuple[ProcessGrid, tuple[str, ...]]] = {
        algorithm: (chain("channel"), ("channel",)) for algorithm in ("x", "y")
    }
    if rows.size % 2 == 0 and rows.size > 2:
        both = ProcessGrid(channel=2, filter=-1, device="cpu")
        grids["w"] = both, ("channel", "filter")
    threads = settings.threads * rows.size
    for case in cases:
        torch.manual_seed(0)
        x = torch.randn(case.shape)
        serial = case.make("auto")
        with torch.no_grad():
            dy = torch.randn(serial(x).shape)
        by_rows = _cut(case.make("auto"), x, dy, rows, Layout(height="height"))
        spatial = Contender(by_rows, settings.threads)
        alone = Contender(step_of(serial, x, dy), threads, ranks=1)
        for algorithm, (grid, axes) in grids.items():
            run = _cut(case.make(algorithm), x, dy, grid, Layout(channel=axes), shard=True)
            subject = Contender(run, settings.threads)
            times = alternate(rows.comm, (subject, spatial, alone), settings.seconds)
            name = f"{case.name}, stationary-{algorithm}"
            row = "channels", name, settings.configuration(grid, by(case.shape))
            yield over(row, "over rows cut", times[0], times[1], None)
            measure = f"speed-up over serial torch, {threads} threads"
            yield speedup(row, measure, times[0], times[2], None)


def _cut(
    layer: nn.Module, x: Tensor, dy: Tensor, grid: ProcessGrid, layout: Layout, shard: bool = False
) -> Callable[[], None]:
    """Return a step of a layer on a tensor in this layout, with sharded weights or whole ones."""
    parallel = parallelize(layer, grid, layouts={"": layout}, shard_parameters=shard)
    return step_of(parallel, *(distribute_tensor(t, grid, layout) for t in (x, dy)))
