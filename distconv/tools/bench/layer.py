"""One convolution on a cut plane, against the same with no communication, and against one rank.

A step is forward, backward to input and weights, and the sum of weight gradients over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from distconv.model.parallelize import parallelize
from distconv.planning.alternation import Contender, alternate
from distconv.tensor.dist_tensor import distribute_tensor
from distconv.tools.bench.report import Row, over, speedup
from distconv.tools.bench.settings import Settings, by


class Case(NamedTuple):
    """A layer, its global input, and its targets."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    over_local: float | None = None
    """The most that a step should take, in times of the layer without communication."""
    speedup: float = 1.0
    """How many times as fast as serial torch a step should at least be."""


CASES = (
    Case(
        "16 -> 16, 3x3, 1024^2",
        lambda: nn.Conv2d(16, 16, 3, padding=1, bias=False),
        (1, 16, 1024, 1024),
        1.03,
        # It moves more memory for each operation than the others.
        1.3,
    ),
    Case(
        "64 -> 64, 3x3, 256^2",
        lambda: nn.Conv2d(64, 64, 3, padding=1, bias=False),
        (1, 64, 256, 256),
        1.03,
    ),
    Case(
        "18 -> 128, 5x5 stride 2, 512^2",
        lambda: nn.Conv2d(18, 128, 5, 2, 2, bias=False),
        (1, 18, 512, 512),
        1.03,
    ),
    Case(
        "16 -> 32, 3^3, 64^3",
        lambda: nn.Conv3d(16, 32, 3, padding=1, bias=False),
        (1, 16, 64, 64, 64),
        1.03,
    ),
    Case(
        "128 -> 128, 3x3, 32^2",
        lambda: nn.Conv2d(128, 128, 3, padding=1, bias=False),
        (1, 128, 32, 32),
        1.15,
    ),
    Case(
        "384 -> 128, 3x3 stride 2, 64^2",
        lambda: nn.Conv2d(384, 128, 3, 2, 1, bias=False),
        (1, 384, 64, 64),
    ),
    Case(
        "3 -> 64, 7x7 stride 2, 224^2",
        lambda: nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        (1, 3, 224, 224),
    ),
    Case(
        "512 -> 128, 1x1, 28^2",
        lambda: nn.Conv2d(512, 128, 1, bias=False),
        (1, 512, 28, 28),
    ),
)


def layers(settings: Settings, cases: Sequence[Case] = CASES) -> Iterator[Row]:
    """Yield two rows for each case; all ranks call it."""
    for case in cases:
        yield from _rows(case, settings)


def _rows(case: Case, settings: Settings) -> Iterator[Row]:
    grid = settings.grid(len(case.shape))
    torch.manual_seed(0)
    x = torch.randn(case.shape)
    cut = distribute_tensor(x, grid)
    block = cut.to_local().clone()
    distributed = parallelize(case.make(), grid)
    local, serial = case.make(), case.make()

    with torch.no_grad():
        dy = torch.randn(distributed(cut).shape)
        dy_cut = distribute_tensor(dy, grid)
        made = local(block).shape
    if made != dy_cut.shard.shape:
        raise ValueError(
            f"{case.name}: without communication a rank makes {by(made)}, cut over {grid} "
            f"{by(dy_cut.shard.shape)}; choose a grid on which they are equal"
        )
    subject = Contender(step_of(distributed, cut, dy_cut), settings.threads)
    bound = Contender(step_of(local, block, dy_cut.to_local().clone()), settings.threads)
    threads = settings.threads * grid.size
    alone = Contender(step_of(serial, x, dy), threads, ranks=1)
    times = alternate(grid.comm, (subject, bound, alone), settings.seconds)
    where = f"{by(case.shape)}, {by(block.shape)} on rank 0"
    row = "layer", case.name, settings.configuration(grid, where)
    yield over(row, "over no communication", times[0], times[1], case.over_local)
    measure = f"speed-up over serial torch, {threads} threads"
    yield speedup(row, measure, times[0], times[2], case.speedup)


def step_of(layer: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], None]:
    """Return a step: forward and backward, with gradients of input and parameters."""
    x.requires_grad_()

    def step() -> None:
        x.grad = None
        layer.zero_grad()
        layer(x).backward(dy)

    return step
