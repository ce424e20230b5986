"""Plans that bring the rows of several ranks to all of them, concatenated."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

from distconv.geometry.layout import Shape
from distconv.geometry.plan import Plan, Route


def concatenation(lengths: Sequence[int], ranks: Sequence[int], rank: int, row: Shape) -> Plan:
    """Return `rank`'s plan for bringing the rows of all `ranks` to each of them, in their order.

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
