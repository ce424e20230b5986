"""The cut of a sample, for pictures: the boxes of the ranks, and the result of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor, nn

import distconv as dc
from distconv.tools.reports.document import COLOURS

LARGEST = 2**22
"""The most numbers of a sample for which rank 0 runs the network on all of it."""

RankBox: TypeAlias = tuple[int, tuple[slice, ...]]
"""A rank, and its box of a tensor."""


def boxes_of(x: dc.DistTensor, grid: dc.ProcessGrid) -> list[RankBox]:
    """Return the ranks that hold elements of a tensor, with their boxes. Collective."""
    found = grid.comm.allgather((grid.rank, x.box.slices))
    return [(rank, box) for rank, box in found if all(s.stop > s.start for s in box)]


def draw_boxes(axes: Axes, boxes: Sequence[RankBox], dimensions: tuple[int, int]) -> None:
    """Draw the edges of the boxes, and their ranks, over an image of two of the dimensions."""
    for rank, box in boxes:
        rows, columns = (box[d] for d in dimensions)
        colour = COLOURS[rank % len(COLOURS)]
        height, width = rows.stop - rows.start, columns.stop - columns.start
        corner = columns.start - 0.5, rows.start - 0.5
        # Half of a line lies outside its box.
        edge = Rectangle(corner, width, height, edgecolor=colour, fill=False, lw=4)
        edge.set_clip_path(Rectangle(corner, width, height, transform=axes.transData))
        axes.add_patch(edge)
        middle = corner[0] + width / 2, corner[1] + height / 2
        shown = {"facecolor": colour, "edgecolor": "none", "boxstyle": "round"}
        axes.text(*middle, f"rank {rank}", color="white", ha="center", va="center", bbox=shown)


def on_one_rank(
    build: Callable[[], nn.Module], model: nn.Module, x: dc.DistTensor
) -> Callable[[], Tensor] | None:
    """Return a function that runs the network in plain torch on the whole sample. Collective.

    The function is for rank 0. None for samples of more than `LARGEST` numbers, and on a grid of
    one rank.

    Args:
        build: makes the network, which gets the weights of `model`.
    """
    if x.numel() > LARGEST or x.grid.size == 1:
        return None
    state, whole = dc.full_state_dict(model), x.full_tensor()

    def run() -> Tensor:
        with torch.random.fork_rng(), torch.no_grad():
            alone = build().to(device=whole.device, dtype=whole.dtype)
            alone.load_state_dict(state)
            result: Tensor = alone.eval()(whole)
        return result

    return run
