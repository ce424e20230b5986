"""Random topologies and cuts, and the content of a buffer by definition."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
from hypothesis import strategies as st

from distconv.geometry.index_maps import IndexMap
from distconv.geometry.layout import Cuts, block
from distconv.geometry.topology import AXES, Topology

OUTSIDE = -1
"""The content of a buffer outside the tensor."""


@st.composite
def topologies(draw: st.DrawFn, most: int = 24) -> Topology:
    """Draw a topology of up to `most` ranks."""
    extents = [1] * len(AXES)
    for i in draw(st.permutations(range(len(AXES)))):
        extents[i] = draw(st.integers(1, min(4, most // prod(extents))))
    return Topology(tuple(extents))


@st.composite
def cuts_of(draw: st.DrawFn, topology: Topology, ndim: int) -> Cuts:
    """Draw cuts: each axis goes to a dimension, or to none, which replicates."""
    cuts: list[tuple[str, ...]] = [()] * ndim
    axes = [axis for axis in AXES if topology.extent(axis) > 1]
    for axis in draw(st.permutations(axes)):
        d = draw(st.integers(-1, ndim - 1))
        if d >= 0:
            cuts[d] = (*cuts[d], axis)
    return tuple(cuts)


def needed(
    whole: np.ndarray, topology: Topology, rank: int, target: Cuts, needs: Sequence[IndexMap]
) -> np.ndarray:
    """Return the buffer of a rank by definition: the intervals of its outputs, end to end."""
    positions = []
    for n, m, axes in zip(whole.shape, needs, target, strict=True):
        part = topology.part(topology.coordinates(rank), axes)
        start, stop = block(m.output_size(n), topology.parts(axes), part)
        intervals = m.intervals(n, start, stop) if start < stop else ()
        positions.append([i for a, b in intervals for i in range(a, b)])
    buffer = np.full([len(p) for p in positions], OUTSIDE)
    for place in np.ndindex(*buffer.shape):
        index = tuple(p[i] for p, i in zip(positions, place, strict=True))
        if all(0 <= i < n for i, n in zip(index, whole.shape, strict=True)):
            buffer[place] = whole[index]
    return buffer
