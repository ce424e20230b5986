"""Plans of what ranks ask for: a box of a tensor each, or rows of one dimension.

The needs of most operators follow from shapes alone (`plan`). What a warp samples, and what a
tensor of positions picks, depends on values, so the ranks tell each other first. Index arithmetic
only.
"""

from __future__ import annotations

from functools import lru_cache

from distconv.geometry.layout import Box, Cuts, Shape, rank_box
from distconv.geometry.plan import Plan, Route, Slices
from distconv.geometry.topology import Topology


@lru_cache(maxsize=256)
def boxes_plan(
    topology: Topology,
    rank: int,
    shape: Shape,
    cuts: Cuts,
    ranks: tuple[int, ...],
    boxes: tuple[Box, ...],
) -> Plan:
    """Return `rank`'s plan for bringing to each of `ranks` the box of a tensor that it asks for.

    Parameters
    ----------
    shape, cuts: the global shape of the tensor, and its cuts.
    ranks: ranks that hold all elements of the boxes, `rank` among them.
    boxes: the box of global indices for which each of `ranks` asks; it may be empty.
    """
    blocks = [rank_box(shape, cuts, topology, peer) for peer in ranks]
    here = ranks.index(rank)
    own: tuple[tuple[Slices, Slices], ...] = ()
    sends, receives = [], []
    for i, peer in enumerate(ranks):
        arriving = _common(blocks[i], boxes[here])
        leaving = _common(blocks[here], boxes[i])
        if peer == rank and arriving is not None:
            own = ((_within(arriving, blocks[here]), _within(arriving, boxes[here])),)
        elif peer != rank:
            if arriving is not None:
                receives.append(Route.of(peer, (_within(arriving, boxes[here]),)))
            if leaving is not None:
                sends.append(Route.of(peer, (_within(leaving, blocks[here]),)))
    shapes = blocks[here].shape, boxes[here].shape
    return Plan(*shapes, own, tuple(sends), tuple(receives), identity=len(ranks) == 1)


def _common(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, None if it is empty."""
    start = tuple(map(max, one.start, other.start))
    stop = tuple(map(min, one.stop, other.stop))
    return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None


def _within(box: Box, outer: Box) -> Slices:
    """Return the index of `box` in an array of the elements of `outer`."""
    bounds = zip(box.start, box.stop, outer.start, strict=True)
    return tuple(slice(a - start, b - start) for a, b, start in bounds)
