"""One convolution on a cut plane or volume, against plain torch on the block and on the whole.

A step is forward, backward to input and weights, and the sum of weight gradients over the ranks.
Plain torch on the block does not communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.measuring.own_step import OVER_DEFAULT, OVER_PLAIN
from benchmarks.measuring.plain import best, plain_forms
from benchmarks.measuring.report import Row, over, speedup
from benchmarks.measuring.settings import Settings, by
from benchmarks.measuring.turns import alternate
from distconv.model.parallelize import parallelize
from distconv.planning.scaling import Contender
from distconv.tensor.dist_tensor import distribute_tensor


class Case(NamedTuple):
    """A layer, its global input, and its targets."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    over_plain: float | None = None
    """The longest that a step should take, in times of the best plain torch on the block."""
    speedup: float = 1.0
    """How many times as fast as serial torch a step should at least be."""


def plane(
    channels: int, filters: int, extent: int, kernel: int = 3, stride: int = 1, **targets: float
) -> Case:
    """Return the case of a convolution with "same" padding and no bias on a square plane."""
    strided = f" stride {stride}" if stride > 1 else ""
    return Case(
        f"{channels} -> {filters}, {kernel}x{kernel}{strided}, {extent}^2",
        partial(nn.Conv2d, channels, filters, kernel, stride, kernel // 2, bias=False),
        (1, channels, extent, extent),
        **targets,
    )


CASES = (
    # It moves more memory for each operation than the others.
    plane(16, 16, 1024, over_plain=1.05, speedup=1.3),
    plane(16, 16, 512, over_plain=1.05),
    plane(64, 64, 256, over_plain=1.05),
    plane(18, 128, 512, 5, 2, over_plain=1.05),
    Case(
        "16 -> 32, 3^3, 64^3",
        partial(nn.Conv3d, 16, 32, 3, padding=1, bias=False),
        (1, 16, 64, 64, 64),
        1.05,
    ),
    plane(128, 128, 64, over_plain=1.15),
    plane(128, 128, 32, over_plain=1.35),
    plane(384, 128, 64, 3, 2),
    plane(3, 64, 224, 7, 2),
    plane(512, 128, 28, 1),
)


def layers(settings: Settings, cases: Sequence[Case] = CASES) -> Iterator[Row]:
    """Yield the rows of each case; all ranks call it."""
    for case in cases:
        yield from _rows(case, settings)


def _rows(case: Case, settings: Settings) -> Iterator[Row]:
    grid = settings.grid(len(case.shape))
    torch.manual_seed(0)
    x = torch.randn(case.shape)
    cut = distribute_tensor(x, grid)
    block = cut.to_local().clone()
    distributed = parallelize(case.make(), grid)
    with torch.no_grad():
        dy = torch.randn(distributed(cut).shape)
        dy_cut = distribute_tensor(dy, grid)
        made = case.make()(block).shape
    if made != dy_cut.shard.shape:
        raise ValueError(
            f"{case.name}: without communication a rank makes {by(made)}, cut over {grid} "
            f"{by(dy_cut.shard.shape)}; choose a grid on which they are equal"
        )
    plain = plain_forms(case.make, (block, dy_cut.to_local()), step_of).values()
    serial = plain_forms(case.make, (x, dy), step_of).values()
    threads = settings.threads * grid.size
    here = [step_of(distributed, cut, dy_cut), *plain]
    sides = [
        *(Contender(run, settings.threads) for run in here),
        *(Contender(run, threads, ranks=1) for run in serial),
    ]
    subject, *others = alternate(grid.comm, sides, settings.seconds)
    of_block, of_whole = others[: len(plain)], others[len(plain) :]
    where = by(case.shape), f"{by(block.shape)} on rank 0"
    row = "layer", case.name, settings.configuration(grid, *where)
    yield over(row, OVER_PLAIN, subject, best(of_block), case.over_plain)
    yield over(row, OVER_DEFAULT, subject, of_block[0], None)
    measure = f"speed-up over the best serial torch, {threads} threads"
    yield speedup(row, measure, subject, best(of_whole), case.speedup)


def step_of(layer: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], None]:
    """Return a step: forward and backward, with gradients of input and parameters."""
    x.requires_grad_()

    def step() -> None:
        x.grad = None
        layer.zero_grad()
        layer(x).backward(dy)

    return step
