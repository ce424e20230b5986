"""Plans to exchange boxes or rows that ranks request, or that masks select.

Which elements most operators need follows from shapes alone (`plan`). Which elements a warp samples
and positions or masks select depends on values, so the ranks exchange their requests first. Index
arithmetic only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod

from distconv.geometry.layout import Box, Cuts, Shape, rank_box, replaced_at
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
    """Return `rank`'s plan to send to each of `ranks` the box of a tensor that it requests.

    Parameters
    ----------
    shape: the global shape of the tensor.
    cuts: for each dimension, the grid axes that partition the dimension.
    ranks: ranks that hold all elements of the boxes, `rank` among them.
    boxes: for each of `ranks`, the requested box of global indices, which may be empty.
    """
    blocks = [rank_box(shape, cuts, topology, peer) for peer in ranks]
    here = ranks.index(rank)
    own: tuple[tuple[Slices, Slices], ...] = ()
    sends, receives = [], []
    for i, peer in enumerate(ranks):
        arriving = blocks[i].intersection(boxes[here])
        leaving = blocks[here].intersection(boxes[i])
        if peer == rank and arriving is not None:
            own = ((arriving.slices_within(blocks[here]), arriving.slices_within(boxes[here])),)
        elif peer != rank:
            if arriving is not None:
                receives.append(Route.of(peer, (arriving.slices_within(boxes[here]),)))
            if leaving is not None:
                sends.append(Route.of(peer, (leaving.slices_within(blocks[here]),)))
    shapes = blocks[here].shape, boxes[here].shape
    return Plan(*shapes, own, tuple(sends), tuple(receives), identity=len(ranks) == 1)


def rows_plan(
    sent: Sequence[int],
    received: Sequence[int],
    ranks: Sequence[int],
    rank: int,
    row: Shape,
    d: int,
) -> Plan:
    """Return `rank`'s plan to send rows to each of `ranks`, and to receive rows from each.

    The block contains the rows to send and the buffer the received rows, both in the order of
    `ranks`.

    Parameters
    ----------
    sent, received: for each of `ranks`, which include `rank`, the number of rows sent and received.
    row: the shape of block and buffer, except for dimension `d`, which counts rows.
    """
    whole = tuple(slice(0, n) for n in row)
    size = prod(replaced_at(row, d, 1))

    def boxes(counts: Sequence[int]) -> list[Slices]:
        starts = accumulate(counts, initial=0)
        places = zip(starts, counts, strict=False)
        return [replaced_at(whole, d, slice(a, a + n)) for a, n in places]

    here, leaving, arriving = ranks.index(rank), boxes(sent), boxes(received)
    full = [i for i in range(len(ranks)) if i != here and size]
    return Plan(
        block_shape=replaced_at(row, d, sum(sent)),
        buffer_shape=replaced_at(row, d, sum(received)),
        own=((leaving[here], arriving[here]),) if sent[here] and size else (),
        sends=tuple(Route.of(ranks[i], (leaving[i],)) for i in full if sent[i]),
        receives=tuple(Route.of(ranks[i], (arriving[i],)) for i in full if received[i]),
        identity=len(ranks) == 1,
    )


def concatenation(lengths: Sequence[int], ranks: Sequence[int], rank: int, row: Shape) -> Plan:
    """Return `rank`'s plan to all-gather the rows of `ranks`, concatenated in the order of `ranks`.

    Parameters
    ----------
    lengths: the number of rows of each of `ranks`, which include `rank`.
    row: the shape of a row.
    """
    here = ranks.index(rank)
    starts = [0, *accumulate(lengths)]
    of_row = tuple(slice(0, n) for n in row)
    places = [(slice(a, a + n), *of_row) for a, n in zip(starts, lengths, strict=False)]
    mine = (slice(0, lengths[here]), *of_row)
    size = prod(row)
    others = [i for i in range(len(ranks)) if i != here]
    full = lengths[here] and size
    return Plan(
        block_shape=(lengths[here], *row),
        buffer_shape=(starts[-1], *row),
        own=((mine, places[here]),) if full else (),
        sends=tuple(Route.of(ranks[i], (mine,)) for i in others if full),
        receives=tuple(Route.of(ranks[i], (places[i],)) for i in others if lengths[i] and size),
        identity=len(ranks) == 1,
    )
