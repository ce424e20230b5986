"""The schedule of ring attention: which blocks each rank sends and receives at each step.

Along the grid axes that partition both queries and keys, ranks form a ring. On a tour, blocks of
keys (or, to balance causal attention, of queries) are sent to the other ranks of the ring. The
schedule also decides which queries attend to which keys. Index arithmetic only: every rank computes
the same schedule.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import ceil, prod
from typing import NamedTuple

from distconv.geometry.layout import Axes, Box, Shape, block, cutting_axes, rank_box
from distconv.geometry.topology import Topology
from distconv.ops.attention.arrangement import Arrangement, Sizes

MOST_TOURS = 8
"""The most tours of the keys. With 8 tours, visitors take an eighth of the memory of a block, if
the number of heads allows."""

SMALLEST_VISITOR = 2**16
"""The fewest elements of keys and values for which a separate tour is worthwhile."""


class Positions(NamedTuple):
    """The positions of a block of queries or keys in the global sequence.

    The sequence may combine several dimensions, called factors, of sizes `sizes`. `box` is the
    block in the factors.
    """

    box: Box
    sizes: Shape

    @property
    def size(self) -> int:
        """Return the number of positions in the block."""
        return self.box.size

    @property
    def first(self) -> int:
        """Return the first position of a block that is not empty."""
        return self._number(self.box.start)

    @property
    def stop(self) -> int:
        """Return the position after the last one of a block that is not empty."""
        return self._number(n - 1 for n in self.box.stop) + 1

    @property
    def consecutive(self) -> bool:
        """Return whether the positions follow each other without gaps."""
        return not self.size or self.stop - self.first == self.size

    def _number(self, places: Iterable[int]) -> int:
        number = 0
        for place, size in zip(places, self.sizes, strict=True):
            number = number * size + place
        return number


def attends(rows: Positions, columns: Positions, causal: bool) -> bool:
    """Return whether any of the queries at `rows` attends to any of the keys at `columns`.

    If `causal`, a query attends only to keys whose position is not greater than its own.
    """
    if not rows.size or not columns.size:
        return False
    return not causal or rows.stop > columns.first


def stretches(rows: Positions, columns: Positions, causal: bool) -> list[tuple[slice, slice, bool]]:
    """Return which consecutive queries attend to which consecutive keys, as slices of their blocks.

    Each item has a slice of the queries at `rows`, a slice of the keys at `columns`, and a flag.
    With the flag True the first query attends to the first key, the second query to the first two
    keys, and so on. With False each query attends to all keys of the slice. Causal positions must
    be consecutive.
    """
    whole = slice(None)
    if not causal:
        return [(whole, whole, False)]
    start, stop, begin = rows.first, rows.stop, columns.first
    end = min(columns.stop, stop)
    found = []
    if begin < start:
        found.append((whole, slice(0, min(end, start) - begin), False))
    first = max(begin, start)
    if first < end:
        found.append((slice(first - start, None), slice(first - begin, end - begin), True))
    return found


class Tour(NamedTuple):
    """A tour, on which the ranks of a ring send the keys of some samples or heads to each other.

    The samples or heads are a range of one of their dimensions.

    Attributes
    ----------
    number: the number of the tour.
    back: the number of the dimension, counted from 1 backwards from the last one of samples and
        heads; 0 for a tour of all samples and heads.
    start, stop: the range within this rank's block.
    """

    number: int
    back: int
    start: int
    stop: int


class Round(NamedTuple):
    """The messages of one step of a tour: a block to send, and a block to receive.

    Attributes
    ----------
    target, source: the ranks to send to and to receive from; None for no message.
    queries_go, queries_come: whether queries, not keys, are sent, and received.
    """

    target: int | None
    source: int | None
    queries_go: bool
    queries_come: bool


class Schedule(NamedTuple):
    """The inputs from which all tours and messages of one rank follow.

    Attributes
    ----------
    arrangement, sizes: the partition, and the global sizes.
    causal: whether a query attends only to keys whose position is not greater than its own.
    """

    topology: Topology
    rank: int
    arrangement: Arrangement
    sizes: Sizes
    causal: bool

    @property
    def ring(self) -> Axes:
        """Return the grid axes that partition both queries and keys."""
        rows = cutting_axes(self.arrangement.rows)
        return tuple(a for a in cutting_axes(self.arrangement.columns) if a in rows)

    @property
    def sums(self) -> Axes:
        """Return the grid axes that partition keys but not queries."""
        return tuple(a for a in cutting_axes(self.arrangement.columns) if a not in self.ring)

    @property
    def samples(self) -> Box:
        """Return this rank's box of samples and heads."""
        return rank_box(self.sizes.batch, self.arrangement.batch, self.topology, self.rank)

    def rows(self, rank: int) -> Positions:
        """Return the positions of the queries that `rank` holds."""
        sizes = self.sizes.rows
        return Positions(rank_box(sizes, self.arrangement.rows, self.topology, rank), sizes)

    def columns(self, rank: int) -> Positions:
        """Return the positions of the keys that `rank` holds."""
        sizes = self.sizes.columns
        return Positions(rank_box(sizes, self.arrangement.columns, self.topology, rank), sizes)


@lru_cache(maxsize=1024)
def tours_of(s: Schedule) -> tuple[Tour, ...]:
    """Return the successive tours of a schedule. Every rank has the same number of tours."""
    cuts = s.arrangement.batch
    largest = [ceil(n / s.topology.parts(a)) for n, a in zip(s.sizes.batch, cuts, strict=True)]
    visiting = [1 if shared else n for n, shared in zip(largest, s.sizes.shared, strict=True)]
    if not s.ring or max(visiting, default=1) == 1:
        return (Tour(0, 0, 0, 0),)
    chosen = visiting.index(max(visiting))
    parts = s.topology.parts(cutting_axes(s.arrangement.columns))
    visitor = prod(visiting) * prod(s.sizes.columns) // parts * sum(s.sizes.features)
    count = max(min(MOST_TOURS, visiting[chosen], visitor // SMALLEST_VISITOR), 1)
    n, back = s.samples.shape[chosen], len(largest) - chosen
    return tuple(Tour(i, back, *block(n, count, i)) for i in range(count))


@lru_cache(maxsize=1024)
def _members(s: Schedule) -> list[int]:
    """Return the ranks of this rank's ring, in the order of the positions of their keys."""
    peers = s.topology.peers(s.rank, s.ring)
    return sorted(peers, key=lambda rank: (s.columns(rank).box.start, rank))


@lru_cache(maxsize=1024)
def is_balanced(s: Schedule) -> bool:
    """Return whether queries are sent as well as keys, so that the ranks of a ring compute equally.

    This is so for causal attention with equal, consecutive blocks of queries and keys.
    """
    cuts, sizes = s.arrangement, s.sizes
    if not s.causal or sizes.rows != sizes.columns or cuts.rows != cuts.columns:
        return False
    return all(s.rows(rank).consecutive for rank in _members(s))


@lru_cache(maxsize=4096)
def rounds_of(s: Schedule, tour: Tour) -> tuple[Round, ...]:
    """Return the successive steps of a tour. Every rank of a ring has the same number of steps."""
    members, balanced = _members(s), is_balanced(s)
    n, own = len(members), members.index(s.rank)
    nobody = not s.samples.size or (tour.back > 0 and tour.start == tour.stop)

    def visits(owner: int, host: int, queries: bool) -> bool:
        rows, columns = (owner, host) if queries else (host, owner)
        return not nobody and attends(s.rows(rows), s.columns(columns), s.causal)

    found = []
    for distance in range(1, n // 2 + 1 if balanced else n):
        after, before = own + distance, own - distance
        target, source = members[after % n], members[before]
        queries_go, queries_come = balanced and after >= n, balanced and before < 0
        goes = visits(s.rank, target, queries_go)
        comes = visits(source, s.rank, queries_come)
        if balanced and 2 * distance == n:
            # Either of two ranks that are half a ring apart may compute for both.
            queries = tour.number % 2 == 1
            goes, comes = goes and queries_go == queries, comes and queries_come == queries
        found.append(
            Round(target if goes else None, source if comes else None, queries_go, queries_come)
        )
    return tuple(found)
