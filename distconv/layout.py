"""Queries about partitioned tensors, for rules that users write; see docs/howto/extending.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from distconv.geometry import layout as of_tuples
from distconv.geometry.layout import Box, Cuts, Layout, cutting_axes
from distconv.geometry.topology import AXES, Topology

__all__ = ["Box", "Cuts", "Layout", "cutting_axes", "rank_box", "replicating_axes"]


def replicating_axes(cuts: Iterable[Iterable[str]], topology: Topology) -> tuple[str, ...]:
    """Return the grid axes with several ranks along which a tensor is replicated.

    `cuts` has the grid axes that partition each dimension, as `x.cuts` does. Raises TypeError for
    anything else.

    Examples
    --------
    >>> from distconv import layout
    >>> grid = dc.ProcessGrid(height=2)
    >>> layout.replicating_axes(((), (), ("height",), ()), grid.topology)
    ()
    >>> layout.replicating_axes(((), (), (), ()), grid.topology)
    ('height',)
    """
    return of_tuples.replicating_axes(_checked(cuts), topology)


def rank_box(
    shape: Sequence[int], cuts: Iterable[Iterable[str]], topology: Topology, rank: int
) -> Box:
    """Return the box that `rank` holds of a tensor of global `shape`, partitioned by `cuts`.

    `cuts` has the grid axes that partition each dimension, as `x.cuts` does. Raises TypeError for
    anything else.

    Examples
    --------
    >>> from distconv import layout
    >>> grid = dc.ProcessGrid(height=2)
    >>> cuts = dc.default_layout(grid, 4).cuts(4)
    >>> layout.rank_box((1, 1, 5, 4), cuts, grid.topology, rank=1)
    Box(start=(0, 0, 3, 0), stop=(1, 1, 5, 4))
    """
    return of_tuples.rank_box(tuple(shape), _checked(cuts), topology, rank)


def _checked(cuts: Iterable[Iterable[str]]) -> Cuts:
    """Return `cuts` as tuples, as keys for the library's caches; raise TypeError if invalid."""
    with suppress(TypeError):  # of what has no dimensions, such as a Layout
        found = tuple(map(tuple, cuts))
        if set(cutting_axes(found)) <= set(AXES):
            return found
    raise TypeError(
        f"{cuts!r} does not have the grid axes of each dimension; pass a sequence of sequences of "
        "their names, such as ((), (), ('height',), ())"
    )
