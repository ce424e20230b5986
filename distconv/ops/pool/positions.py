"""Positions of maxima in the plane: borders of the searched buffers, and numbers of positions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from distconv.geometry.index_maps import Window
from distconv.geometry.layout import Box
from distconv.ops.support.constants import constant
from distconv.ops.support.global_positions import unravel
from distconv.tensor.dist_tensor import DistTensor


def lowest_value(x: Tensor) -> float:
    """Return the smallest number of the type of `x`."""
    return -torch.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min


def buffer_starts(input: DistTensor, windows: Sequence[Window], box: Box) -> list[int]:
    """Return the position in the plane at which the buffer for the block `box` of outputs starts.

    Along a dimension that is not cut the local operator pads by itself, outside the buffer.
    """
    return [
        w.intervals(n, a, b)[0][0] if axes else 0
        for w, n, a, b, axes in zip(
            windows, input.shape[2:], box.start[2:], box.stop[2:], input.cuts[2:], strict=True
        )
    ]


class Border(NamedTuple):
    """Positions of a buffer that lie before the plane, along one of its dimensions.

    Each of them repeats the first position in the plane of the windows that begin there. Maxima are
    the same, and a window that holds only `lowest_value` finds its own position in the plane, as in
    torch.

    Attributes
    ----------
    dim: the dimension.
    repeated: for each of the positions, which come first, the position that it repeats.
    """

    dim: int
    repeated: tuple[int, ...]

    def fill(self, buffer: Tensor) -> None:
        """Write elements of the plane over the padding before it."""
        inner = buffer.index_select(self.dim, constant(buffer.device, self.repeated))
        buffer.narrow(self.dim, 0, len(self.repeated)).copy_(inner)

    def fold(self, gradient: Tensor) -> None:
        """Add the gradients of the border to those of the elements that it repeats."""
        outer = gradient.narrow(self.dim, 0, len(self.repeated)).clone()
        gradient.index_add_(self.dim, constant(gradient.device, self.repeated), outer)


def borders(
    searched: Sequence[int], windows: Sequence[Window], starts: Sequence[int]
) -> list[Border]:
    """Return the borders of a buffer with plane `searched`, in all dimensions.

    A block that is its own buffer has none, and is not written to.
    """
    found = []
    for d, (n, window, start) in enumerate(zip(searched, windows, starts, strict=True), 2):
        if start < 0:
            repeated = [min(p % window.dilation - start, n - 1) for p in range(start, 0)]
            found.append(Border(d, tuple(repeated)))
    return found


def renumber_positions(
    index: Tensor,
    searched: Sequence[int],
    starts: Sequence[int],
    windows: Sequence[Window],
    plane: Sequence[int],
) -> Tensor:
    """Return row-major numbers of positions in `searched` as numbers in the global `plane`.

    `searched` begins at `starts` in the plane, or before it where elements are repeated.
    """
    rows_are_whole = tuple(searched[1:]) == tuple(plane[1:]) and not any(starts[1:])
    if rows_are_whole and starts[0] >= 0:
        return index + starts[0] * prod(plane[1:])
    number = torch.zeros_like(index)
    coordinates = zip(unravel(index, searched), starts, windows, plane, strict=True)
    for local, start, window, size in coordinates:
        position = local + start
        if start < 0:
            # Positions before the plane repeat elements of it.
            position = torch.where(position < 0, position % window.dilation, position)
        number = number * size + position
    return number
