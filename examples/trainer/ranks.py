"""The partition of samples, for pictures: blocks and halos of the ranks, and one rank's result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor, nn

import distconv as dc
from distconv.geometry.index_maps import Window
from distconv.geometry.layout import block
from distconv.tools.reports.figures import COLOURS

LARGEST = 2**22
"""The most numbers of a sample for which rank 0 runs the network on all of it."""

RankBox: TypeAlias = tuple[int, tuple[slice, ...]]
"""A rank, and its box of a tensor."""


def boxes_of(x: dc.DistTensor, grid: dc.ProcessGrid) -> list[RankBox]:
    """Return the ranks that hold elements of a tensor, with their boxes. Collective."""
    found = grid.comm.allgather((grid.rank, x.box.slices))
    return [(rank, box) for rank, box in found if all(s.stop > s.start for s in box)]


def needed_boxes(
    convolution: nn.Conv2d, boxes: Sequence[RankBox], shape: Sequence[int]
) -> list[RankBox]:
    """Return the ranks with the boxes of a tensor that they need for a convolution of it.

    A rank's halo is the part of the needed box outside its own.

    Args:
        boxes: the boxes of all ranks in the tensor.
        shape: of the tensor, (N, C, H, W).
    """
    found = []
    for rank, box in boxes:
        needed = list(box)
        for d, size in ((2, shape[2]), (3, shape[3])):
            kernel, stride, dilation, padding = (
                int(numbers[d - 2])
                for numbers in (
                    convolution.kernel_size,
                    convolution.stride,
                    convolution.dilation,
                    convolution.padding,
                )
            )
            window = Window(kernel, stride, dilation, (padding, padding))
            starts = sorted({other[d].start for _, other in boxes})
            part = starts.index(box[d].start)
            outputs = block(window.output_size(size), len(starts), part)
            ((first, last),) = window.intervals(size, *outputs)
            needed[d] = slice(max(0, min(first, box[d].start)), min(size, max(last, box[d].stop)))
        found.append((rank, tuple(needed)))
    return found


def draw_halos(
    axes: Axes,
    boxes: Sequence[RankBox],
    needed: Sequence[RankBox],
    dimensions: tuple[int, int],
) -> None:
    """Hatch the halo of each rank in its colour, over an image of two of the dimensions.

    Args:
        boxes: the boxes of the ranks.
        needed: the boxes that they need; see `needed_boxes`.
    """
    for (rank, box), (_, whole) in zip(boxes, needed, strict=True):
        colour, label = COLOURS[rank % len(COLOURS)], f"halo that rank {rank} receives"
        for d in dimensions:
            for start, stop in ((whole[d].start, box[d].start), (box[d].stop, whole[d].stop)):
                if start < stop:
                    # Corners are drawn with the first dimension.
                    sides = [whole[k] if d == dimensions[0] else box[k] for k in dimensions]
                    sides[dimensions.index(d)] = slice(start, stop)
                    rows, columns = sides
                    corner = columns.start - 0.5, rows.start - 0.5
                    extents = columns.stop - columns.start, rows.stop - rows.start
                    band = Rectangle(corner, *extents, hatch="///", alpha=0.5, color=colour)
                    band.set_label(label)
                    axes.add_patch(band)
                    label = ""


def draw_boxes(
    axes: Axes,
    boxes: Sequence[RankBox],
    dimensions: tuple[int, int],
    names: bool = True,
) -> None:
    """Draw the edges of the boxes, and the `names` of their ranks, over an image of two of the
    dimensions.
    """
    for rank, box in boxes:
        rows, columns = (box[d] for d in dimensions)
        colour = COLOURS[rank % len(COLOURS)]
        height, width = rows.stop - rows.start, columns.stop - columns.start
        corner = columns.start - 0.5, rows.start - 0.5
        # Half of a line lies outside its box.
        edge = Rectangle(corner, width, height, edgecolor=colour, fill=False, lw=4)
        edge.set_clip_path(Rectangle(corner, width, height, transform=axes.transData))
        axes.add_patch(edge)
        if not names:
            continue
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
