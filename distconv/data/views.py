"""Views: for each position in an augmented sample, the position of the stored element.

Flips, rotations by 90 degrees, crops, translations and halos shift or reverse elements along single
dimensions, or exchange dimensions. So any block of the augmented sample consists of boxes of the
stored sample, and a rank reads these boxes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distconv.geometry.layout import Box, replaced_at

OUTSIDE = -1
"""Marks a position outside the stored sample."""

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """A box of a stored sample, and the slices of a view that hold its elements.

    Attributes
    ----------
    source: the box of the stored sample.
    target: the slices of the view that hold its elements.
    flips: for each dimension of the view, whether the view has the elements in reverse order.
    """

    source: Box
    target: tuple[slice, ...]
    flips: tuple[bool, ...]

    def place(self, out: NDArray[Any], values: NDArray[Any], order: Sequence[int]) -> None:
        """Copy `values`, the elements of the stored box, into `out`, an array of the view's shape.

        `order` has for each dimension of the view the dimension of `values`.
        """
        backwards = tuple(slice(None, None, -1 if flip else None) for flip in self.flips)
        out[self.target] = values.transpose(order)[backwards]

    def within(self, box: Box, order: Sequence[int]) -> Piece | None:
        """Return the intersection of this piece with `box` of the stored sample, or None if empty.

        `order` has for each dimension of the view the dimension of the stored sample.
        """
        source = self.source.intersection(box)
        if source is None:
            return None
        target = []
        for place, flip, d in zip(self.target, self.flips, order, strict=True):
            before = source.start[d] - self.source.start[d]
            behind = self.source.stop[d] - source.stop[d]
            if flip:
                before, behind = behind, before
            target.append(slice(place.start + before, place.stop - behind))
        return Piece(source, tuple(target), self.flips)


@dataclass(frozen=True)
class View:
    """An augmented sample, or a box of it: for each element, its position in the stored sample.

    Attributes
    ----------
    order: for each dimension of the view, the dimension of the stored sample.
    positions: for each dimension of the view, the index of each element along the dimension of the
        stored sample, or `OUTSIDE`.
    """

    order: tuple[int, ...]
    positions: tuple[Positions, ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> View:
        """Return the identity view of a stored sample of `shape`."""
        return cls(tuple(range(len(shape))), tuple(np.arange(n) for n in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the view."""
        return tuple(map(len, self.positions))

    @property
    def straight(self) -> bool:
        """Return whether the view has the dimensions in the order of the stored sample."""
        return self.order == tuple(range(len(self.order)))

    @cached_property
    def filled(self) -> bool:
        """Return whether some elements of the view lie outside the stored sample, so are 0."""
        return any((along < 0).any() for along in self.positions)

    def flipped(self, d: int) -> View:
        """Return the view with dimension `d` reversed."""
        return self._along(d, self.positions[d][::-1])

    def swapped(self, d: int, e: int) -> View:
        """Return the view with dimensions `d` and `e` exchanged."""
        dims = list(range(len(self.order)))
        dims[d], dims[e] = e, d
        return View(tuple(self.order[i] for i in dims), tuple(self.positions[i] for i in dims))

    def moved(self, d: int, by: int, periodic: bool) -> View:
        """Return the view with its elements shifted by `by` indices along dimension `d`.

        Elements shifted beyond one end reappear at the other end if `periodic`. Otherwise these
        elements are lost, and the positions in the gap are `OUTSIDE`.
        """
        along = np.roll(self.positions[d], by)
        if not periodic:
            by = max(-len(along), min(by, len(along)))
            along[slice(0, by) if by >= 0 else slice(by, None)] = OUTSIDE
        return self._along(d, along)

    def cropped(self, d: int, start: int, stop: int) -> View:
        """Return the view of indices `start` to `stop` (exclusive) along dimension `d`."""
        return self._along(d, self.positions[d][start:stop])

    def within(self, box: Box, halo: Sequence[int] = (), border: str = "clip") -> View:
        """Return a box of the view, enlarged by a halo on both sides of each dimension.

        Parameters
        ----------
        halo: the width in elements for each dimension; empty for no halo.
        border: the halo beyond the view: none for "clip", `OUTSIDE` for "zeros", and the elements
            at the other end for "periodic".
        """
        view = self
        sides = halo or (0,) * len(self.order)
        for d, (start, stop, side) in enumerate(zip(box.start, box.stop, sides, strict=True)):
            own = self.positions[d]
            there = np.arange(start - side, stop + side) if start < stop else np.arange(0)
            inside = (there >= 0) & (there < len(own))
            if border == "clip":
                along = own[there[inside]]
            else:
                along = own[there % len(own)]
                if border == "zeros":
                    along[~inside] = OUTSIDE
            view = view._along(d, along)
        return view

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Return the boxes of the stored sample that together fill the view."""
        found = []
        for runs in product(*map(_runs, self.positions)):
            source = sorted(zip(self.order, runs, strict=True), key=lambda pair: pair[0])
            low = tuple(run.start for _, run in source)
            high = tuple(run.start + run.length for _, run in source)
            target = tuple(slice(run.place, run.place + run.length) for run in runs)
            found.append(Piece(Box(low, high), target, tuple(run.backwards for run in runs)))
        return tuple(found)

    def _along(self, d: int, positions: Positions) -> View:
        return replace(self, positions=replaced_at(self.positions, d % len(self.order), positions))


@dataclass(frozen=True)
class _StoredRun:
    """Elements that are contiguous along one dimension, in a view and in the stored sample.

    `place` is the first index of the elements in the view, and `start` the lowest index in the
    stored sample. With `backwards` the view has the elements in reverse order.
    """

    place: int
    start: int
    length: int
    backwards: bool


def _runs(positions: Positions) -> list[_StoredRun]:
    """Split `positions` into runs of consecutive stored indices, leaving out `OUTSIDE`."""
    inside = positions >= 0
    steps = np.diff(positions)
    joined = inside[:-1] & inside[1:] & (np.abs(steps) == 1)
    turns = joined[:-1] & joined[1:] & (steps[:-1] != steps[1:])
    joined[1:] &= ~turns
    edges = [0, *(np.flatnonzero(~joined) + 1).tolist(), len(positions)]
    runs = []
    for first, stop in zip(edges[:-1], edges[1:], strict=True):
        if first < stop and inside[first]:
            ends = int(positions[first]), int(positions[stop - 1])
            runs.append(_StoredRun(first, min(ends), stop - first, ends[0] > ends[1]))
    return runs
