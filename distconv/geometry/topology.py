"""Ranks arranged as a grid with named axes: arithmetic only, no communication."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any
from weakref import WeakValueDictionary

AXES = ("sample", "channel", "filter", "depth", "height", "width")
"""Grid axes from slowest to fastest: the ranks that share a sample are neighbours in rank order."""


class Topology:
    """The extents of the six grid axes, in the order of `AXES`; ranks are numbered row-major.

    Equal extents give the same object, so that caches compare topologies by identity.

    Attributes
    ----------
    extents: the number of ranks along each axis.
    size: the number of ranks.
    """

    extents: tuple[int, ...]
    size: int
    _extent: dict[str, int]
    _stride: dict[str, int]

    def __new__(cls, extents: tuple[int, ...]) -> Topology:
        """Return the topology with `extents`, the same object in all calls."""
        known = _KNOWN.get(extents)
        if known is not None:
            return known
        made = super().__new__(cls)
        strides = [1] * len(AXES)
        for i in reversed(range(len(AXES) - 1)):
            strides[i] = strides[i + 1] * extents[i + 1]
        made.extents, made.size = extents, prod(extents)
        made._extent = dict(zip(AXES, extents, strict=True))
        made._stride = dict(zip(AXES, strides, strict=True))
        return _KNOWN.setdefault(extents, made)

    def __reduce__(self) -> tuple[Any, ...]:
        return Topology, (self.extents,)

    def __repr__(self) -> str:
        return f"Topology({self.extents})"

    def __str__(self) -> str:
        """Return the axes with several ranks, such as `height=2, width=2`."""
        return ", ".join(f"{axis}={n}" for axis, n in self._extent.items() if n > 1)

    def extent(self, axis: str) -> int:
        """Return the number of ranks along one axis."""
        return self._extent[axis]

    def parts(self, axes: Iterable[str]) -> int:
        """Return the number of parts of a dimension that is partitioned over `axes`."""
        return prod(map(self._extent.__getitem__, axes))

    def coordinate(self, rank: int, axis: str) -> int:
        """Return the position of `rank` along `axis`."""
        return rank // self._stride[axis] % self._extent[axis]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of `rank` along every axis."""
        return {axis: self.coordinate(rank, axis) for axis in AXES}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at `coordinates`, one for every axis."""
        return sum(coordinates[axis] * self._stride[axis] for axis in AXES)

    def part(self, coordinates: Mapping[str, int], axes: Iterable[str]) -> int:
        """Return the row-major number over `axes` of the part on the ranks at `coordinates`."""
        index = 0
        for axis in axes:
            index = index * self.extent(axis) + coordinates[axis]
        return index

    def unravel(self, part: int, axes: tuple[str, ...]) -> dict[str, int]:
        """Return the coordinates along `axes` of part number `part`; the inverse of `part`."""
        coordinates = {}
        for axis in reversed(axes):
            part, coordinates[axis] = divmod(part, self.extent(axis))
        return coordinates

    def peers(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """Return, in order, the ranks with the coordinates of `rank` except along `axes`."""
        ranks = [rank]
        for axis in axes:
            stride, extent = self._stride[axis], self._extent[axis]
            ranks = [
                r + (i - self.coordinate(r, axis)) * stride for r in ranks for i in range(extent)
            ]
        return tuple(sorted(ranks))


_KNOWN: WeakValueDictionary[tuple[int, ...], Topology] = WeakValueDictionary()
"""The topologies in use, by their extents."""
