"""Which element of a stored sample stands where in the sample that a program gets.

Flips, rotations by 90 degrees, crops, translations and halos move elements along each dimension
alone, and exchange dimensions. So for any box of the result the boxes of the stored sample follow
that hold its elements, and a rank reads just those: what is cut is cut after it has been moved.
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
"""Stands for the position of an element that is outside the stored sample."""

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """A box of a stored sample, and where a view has its elements.

    Attributes
    ----------
    source: the box.
    target: where its elements are, with the dimensions of the view.
    flips: along which of these they run backwards.
    """

    source: Box
    target: tuple[slice, ...]
    flips: tuple[bool, ...]

    def place(self, out: NDArray[Any], values: NDArray[Any], order: Sequence[int]) -> None:
        """Copy the values of the box to their places in an array of the shape of the view.

        Parameters
        ----------
        order: of the view.
        """
        backwards = tuple(slice(None, None, -1 if flip else None) for flip in self.flips)
        out[self.target] = values.transpose(order)[backwards]

    def within(self, box: Box, order: Sequence[int]) -> Piece | None:
        """Return the part of the piece in a box of the stored sample; None for nothing."""
        start = tuple(map(max, self.source.start, box.start))
        stop = tuple(map(min, self.source.stop, box.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        target = []
        for place, flip, d in zip(self.target, self.flips, order, strict=True):
            before, behind = start[d] - self.source.start[d], self.source.stop[d] - stop[d]
            if flip:
                before, behind = behind, before
            target.append(slice(place.start + before, place.stop - behind))
        return Piece(Box(start, stop), tuple(target), self.flips)


@dataclass(frozen=True)
class View:
    """A sample, or a box of it, as moved elements of a stored one.

    Attributes
    ----------
    order: for each dimension, the one of the stored sample that runs along it.
    positions: for each dimension, the position in the stored sample of each of its elements, or
        `OUTSIDE`.
    """

    order: tuple[int, ...]
    positions: tuple[Positions, ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> View:
        """Return the stored sample itself."""
        return cls(tuple(range(len(shape))), tuple(np.arange(n) for n in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the extent along each dimension."""
        return tuple(map(len, self.positions))

    @property
    def straight(self) -> bool:
        """Return whether the dimensions are those of the stored sample, in its order."""
        return self.order == tuple(range(len(self.order)))

    @cached_property
    def filled(self) -> bool:
        """Return whether there are elements outside the stored sample."""
        return any((along < 0).any() for along in self.positions)

    def flipped(self, d: int) -> View:
        """Return the view with dimension `d` backwards."""
        return self._along(d, self.positions[d][::-1])

    def swapped(self, d: int, e: int) -> View:
        """Return the view with two dimensions exchanged."""
        dims = list(range(len(self.order)))
        dims[d], dims[e] = e, d
        return View(tuple(self.order[i] for i in dims), tuple(self.positions[i] for i in dims))

    def moved(self, d: int, by: int, periodic: bool) -> View:
        """Return the view with the elements further by some places along dimension `d`.

        What leaves at one end comes in at the other if `periodic`; else nothing does.
        """
        along = np.roll(self.positions[d], by)
        if not periodic:
            by = max(-len(along), min(by, len(along)))
            along[slice(0, by) if by >= 0 else slice(by, None)] = OUTSIDE
        return self._along(d, along)

    def cropped(self, d: int, start: int, stop: int) -> View:
        """Return the view from `start` to `stop` along dimension `d`."""
        return self._along(d, self.positions[d][start:stop])

    def within(self, box: Box, halo: Sequence[int] = (), border: str = "clip") -> View:
        """Return a box of the view, larger by a halo on both sides of each dimension.

        Parameters
        ----------
        halo: the extent for each dimension; none where it is left out.
        border: what a halo is beyond the view: nothing for "clip", `OUTSIDE` for "zeros", and for
            "periodic" what is at the other end.
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
        """Return boxes of the stored sample that hold all elements of the view."""
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
    """Neighbours in a view that are neighbours in the stored sample."""

    place: int
    start: int
    length: int
    backwards: bool


def _runs(positions: Positions) -> list[_StoredRun]:
    """Return the runs along one dimension, without what is outside."""
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
