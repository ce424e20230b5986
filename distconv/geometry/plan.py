"""Plans: the boxes that a rank receives and the boxes that it sends, each with the other rank.

By a plan, each rank gathers elements of a partitioned input into its buffer. The rank computes its
block of an output, partitioned by the same or another layout, and an index map per dimension gives
the inputs that this block needs. A halo exchange is a plan between equal layouts, with windows as
index maps. A redistribution is a plan between different layouts, with the index map `Same`. Every
dimension is treated separately, and the elements exchanged by two ranks are the product over the
dimensions. So corners need no special case, owners may be several parts away, and the cost of a
plan depends on the number of neighbours, not on the size of the grid.

Index arithmetic only. The same plan describes the adjoint, which sums the buffers into the blocks.

`cuts` are, for each dimension of a tensor, the grid axes that partition the dimension. They divide
the dimension into numbered parts: source parts of the input, and target parts of the output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any

from distconv.geometry.index_maps import (
    AdaptiveWindow,
    IndexMap,
    Interval,
    Same,
    Strided,
    TransposedWindow,
    Window,
)
from distconv.geometry.layout import (
    Cuts,
    block,
    cutting_axes,
    distinct_parts,
    owning_part,
    rank_box,
)
from distconv.geometry.topology import Topology

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class _Stretch:
    """`length` elements at `source` of a source part, and at `target` of the buffer."""

    source: int
    target: int
    length: int


@dataclass(frozen=True)
class Route:
    """The elements that a rank sends to, or receives from, the rank `peer` in one message.

    The boxes are of the rank's block if it sends, and of its buffer if it receives. Both ranks have
    the boxes in the same order.
    """

    peer: int
    boxes: tuple[Slices, ...]
    size: int
    """The number of elements in all boxes."""
    shape: tuple[int, ...]
    """The shape of the message: the shape of a single box, or (size,) for several boxes."""

    @classmethod
    def of(cls, peer: int, boxes: tuple[Slices, ...]) -> Route:
        """Return the route to or from `peer` with `boxes`."""
        shapes = [tuple(s.stop - s.start for s in box) for box in boxes]
        size = sum(map(prod, shapes))
        return cls(peer, boxes, size, shapes[0] if len(shapes) == 1 else (size,))


@dataclass(frozen=True)
class Plan:
    """The messages and local copies by which one rank fills its buffer, and sends its block.

    The routes `sends` have boxes of the rank's own block, the routes `receives` have boxes of its
    buffer. `own` has pairs of a box of the block and the box of the buffer to which it is copied.
    `identity`, the same on all ranks, is true if every rank's buffer is its own block.
    `channels_last`, the same on all ranks, is true if the channels are the last dimension of
    messages.
    """

    block_shape: tuple[int, ...]
    buffer_shape: tuple[int, ...]
    own: tuple[tuple[Slices, Slices], ...]
    sends: tuple[Route, ...]
    receives: tuple[Route, ...]
    identity: bool
    channels_last: bool = False
    kept: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """A cache of data derived from the plan, such as indices of elements in memory."""

    @cached_property
    def with_channels_last(self) -> Plan:
        """Return this plan with `channels_last=True`. Every route must have a single box."""
        return replace(self, channels_last=True)

    @cached_property
    def packed(self) -> Plan:
        """Return this plan for views of block and buffer with dimensions in the messages' order.

        With `channels_last`, the channels are the last dimension of the views.
        """
        if not self.channels_last:
            return self
        moved = _channels_moved_last
        sends, receives = (
            tuple(Route.of(r.peer, tuple(map(moved, r.boxes))) for r in routes)
            for routes in (self.sends, self.receives)
        )
        own = tuple((moved(a), moved(b)) for a, b in self.own)
        return Plan(
            moved(self.block_shape), moved(self.buffer_shape), own, sends, receives, self.identity
        )

    @cached_property
    def buffer_is_block(self) -> bool:
        """Return whether the buffer equals the rank's own block, element for element."""
        return self.buffer_shape == self.block_shape and (
            prod(self.buffer_shape) == 0
            or (not self.receives and len(self.own) == 1 and self.own[0][0] == self.own[0][1])
        )

    @cached_property
    def whole_block(self) -> Slices:
        """Return the box of all elements of the rank's block."""
        return tuple(slice(0, n) for n in self.block_shape)

    @cached_property
    def beside_own(self) -> Slices:
        """Return a box that contains all elements of the block outside of the first box of `own`.

        If these elements form a box, return that box, else the box of the whole block.
        """
        if not self.own:
            return self.whole_block
        rests = [
            (d, rest)
            for d, (side, n) in enumerate(zip(self.own[0][0], self.block_shape, strict=True))
            for rest in (slice(0, side.start), slice(side.stop, n))
            if rest.start < rest.stop
        ]
        if len(rests) != 1:
            return self.whole_block
        ((d, rest),) = rests
        return (*self.whole_block[:d], rest, *self.whole_block[d + 1 :])

    @cached_property
    def covered(self) -> bool:
        """Return whether every element of the buffer is written, with no padding left."""
        own = sum(prod(s.stop - s.start for s in source) for source, _ in self.own)
        return own + sum(r.size for r in self.receives) == prod(self.buffer_shape)

    @cached_property
    def pieces(self) -> tuple[int, tuple[int | tuple[int, ...], ...]] | None:
        """Return a dimension, and the pieces that concatenate along it to the buffer.

        A piece is the number of a message, -1 for the box in `own`, or the shape of padding.
        Returns None if there is no such dimension, or if messages are contiguous in the buffer and
        can be received there.
        """
        boxes = [box for _, box in self.own] + [box for r in self.receives for box in r.boxes]
        if len(self.own) != 1 or len(boxes) != 1 + len(self.receives):
            return None
        found = pieces_along(self.buffer_shape, boxes)
        if found is None or prod(self.buffer_shape[: found[0]]) == 1:
            return None
        d, pieces = found
        return d, tuple(p - 1 if isinstance(p, int) else p for p in pieces)


def _channels_moved_last(sides: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return `sides`, which has one entry per dimension, with the entry of the channels last."""
    samples, channels, *space = sides
    return samples, *space, channels


def pieces_along(
    shape: tuple[int, ...], boxes: Sequence[Slices]
) -> tuple[int, tuple[int | tuple[int, ...], ...]] | None:
    """Return a dimension, and the pieces that concatenate along it to an array of `shape`.

    A piece is the number of one of `boxes`, which have no element in common, or the shape of
    padding between them. Returns None if there is no such dimension.
    """
    whole = tuple(slice(0, n) for n in shape)
    along = {d for box in boxes for d in range(len(shape)) if box[d] != whole[d]}
    if len(along) != 1:
        return None
    (d,) = along
    found: list[int | tuple[int, ...]] = []
    end = 0
    for start, stop, i in sorted((box[d].start, box[d].stop, i) for i, box in enumerate(boxes)):
        if end < start:
            found.append((*shape[:d], start - end, *shape[d + 1 :]))
        found.append(i)
        end = stop
    if end < shape[d]:
        found.append((*shape[:d], shape[d] - end, *shape[d + 1 :]))
    return d, tuple(found)


@dataclass(frozen=True)
class _Dimension:
    """One dimension of a plan: the axes and parts of input and output, and the index map."""

    size: int
    source_axes: tuple[str, ...]
    source_parts: int
    outputs: int
    target_axes: tuple[str, ...]
    target_parts: int
    needs: IndexMap

    def intervals(self, part: int) -> tuple[Interval, ...]:
        """Return the input intervals, with padding, that target part number `part` needs."""
        start, stop = block(self.outputs, self.target_parts, part)
        return self.needs.intervals(self.size, start, stop) if start < stop else ()

    @property
    def identity(self) -> bool:
        """Return whether each target part i needs exactly source part i, on the same ranks."""
        if self.source_axes != self.target_axes:
            return False
        if _is_identity(self.needs, self.size):
            return True
        steps = self.needs.steps if isinstance(self.needs, Window | TransposedWindow) else None
        if steps is not None:
            # Windows that cover each part, such as pooling by 2.
            parts = distinct_parts(self.size, self.outputs, self.source_parts, steps)
        elif self.size == self.outputs or self.source_parts <= 2:
            # The first part shows of most other maps that they are not the identity.
            parts = iter(range(min(self.source_parts, max(self.size, self.outputs))))
        else:
            return False
        return all(self.intervals(j) == self._own(j) for j in parts)

    def _own(self, part: int) -> tuple[Interval, ...]:
        """Return the inputs that source part number `part` holds, as one interval or none."""
        start, stop = block(self.size, self.source_parts, part)
        return ((start, stop),) if start < stop else ()

    def taken(self, source: int, target: int) -> tuple[_Stretch, ...]:
        """Return the runs of elements that target part `target` needs from source part `source`."""
        start, stop = block(self.size, self.source_parts, source)
        found, offset = [], 0
        for first, last in self.intervals(target):
            a, b = max(first, start), min(last, stop)
            if a < b:
                found.append(_Stretch(a - start, offset + a - first, b - a))
            offset += last - first
        return tuple(found)

    def overlap(self, source: int, target: int) -> int:
        """Return the number of elements that target part `target` needs from part `source`."""
        start, stop = block(self.size, self.source_parts, source)
        pieces = (min(b, stop) - max(a, start) for a, b in self.intervals(target))
        return sum(n for n in pieces if n > 0)

    def targets(self, source: int) -> set[int]:
        """Return a superset of the target parts that need elements from source part `source`."""
        start, stop = block(self.size, self.source_parts, source)
        if start == stop:
            return set()
        dependents = self.needs.dependents(self.size, start, stop)
        return _parts_meeting(self.outputs, self.target_parts, dependents)

    def sources(self, target: int) -> set[int]:
        """Return the source parts from which target part `target` needs elements."""
        return _parts_meeting(self.size, self.source_parts, self.intervals(target))


def _parts_meeting(size: int, parts: int, intervals: Iterable[Interval]) -> set[int]:
    """Return the numbers of the parts that have elements in common with `intervals`.

    `size` positions are partitioned into `parts`. The intervals may extend beyond [0, size).
    """
    meeting: set[int] = set()
    for first, last in intervals:
        a, b = max(first, 0), min(last, size)
        if a < b:
            stop = owning_part(size, parts, b - 1) + 1
            meeting.update(range(owning_part(size, parts, a), stop))
    return meeting


@lru_cache(maxsize=16384)
def make_plan(
    topology: Topology,
    rank: int,
    shape: tuple[int, ...],
    source: Cuts,
    target: Cuts,
    needs: tuple[IndexMap, ...],
) -> Plan:
    """Return `rank`'s plan by which every rank gathers the inputs of its block of the output.

    Parameters
    ----------
    shape: the global shape of the input.
    source: for each dimension of the input, the grid axes that partition the dimension.
    target: the same for the output, whose size in dimension d is `needs[d].output_size(shape[d])`.
    needs: the index map of every dimension.
    """
    dimensions, source_here, target_here = _placed(topology, rank, shape, source, target, needs)
    here = topology.coordinates(rank)
    own: tuple[tuple[Slices, Slices], ...] = ()
    receives = []
    owners = [sorted(d.sources(j)) for d, j in zip(dimensions, target_here, strict=True)]
    for parts in product(*owners):
        boxes = _boxes(dimensions, parts, target_here)
        peer = topology.rank(here | _coordinates(topology, source, parts))
        if peer == rank:
            own = boxes
        else:
            receives.append(Route.of(peer, tuple(b for _, b in boxes)))

    sends = []
    for peer, parts in _targets(topology, rank, dimensions, source_here, source, target):
        if peer != rank:
            boxes = _boxes(dimensions, source_here, parts)
            sends.append(Route.of(peer, tuple(a for a, _ in boxes)))

    return Plan(
        block_shape=rank_box(shape, source, topology, rank).shape,
        buffer_shape=tuple(
            sum(stop - start for start, stop in d.intervals(j))
            for d, j in zip(dimensions, target_here, strict=True)
        ),
        own=own,
        sends=tuple(sends),
        receives=tuple(receives),
        identity=all(d.identity for d in dimensions),
    )


@lru_cache(maxsize=16384)
def elements_moved(
    topology: Topology,
    rank: int,
    shape: tuple[int, ...],
    source: Cuts,
    target: Cuts,
    needs: tuple[IndexMap, ...],
) -> int:
    """Return the number of elements that `rank` sends and receives by the plan of `make_plan`.

    The number is computed without the plan: boxes are products of intervals, so sums over ranks are
    products of sums over parts.
    """
    dimensions, source_here, target_here = _placed(topology, rank, shape, source, target, needs)
    here, moving = topology.coordinates(rank), set(cutting_axes(source))
    counts = [
        _counts(d, i, j, tuple(_takers(topology, here, moving, d, i)))
        for d, i, j in zip(dimensions, source_here, target_here, strict=True)
    ]
    received, sent, own = (prod(count[k] for count in counts) for k in range(3))
    copies = prod(topology.extent(axis) for axis in _free_axes(source, target))
    return received + copies * sent - 2 * own


@lru_cache(maxsize=16384)
def _counts(
    d: _Dimension, source: int, target: int, takers: tuple[int, ...]
) -> tuple[int, int, int]:
    """Return the numbers of elements gathered, sent and kept by one rank along one dimension.

    The rank holds part `source` of the input and computes part `target` of the output. It gathers
    elements from all source parts, its own included; it sends elements to the target parts
    `takers`, its own included; and it keeps the elements of its own source part that its target
    part needs.
    """
    received = sum(d.overlap(i, target) for i in d.sources(target))
    sent = sum(d.overlap(source, j) for j in takers)
    return received, sent, d.overlap(source, target)


def _placed(
    topology: Topology,
    rank: int,
    shape: tuple[int, ...],
    source: Cuts,
    target: Cuts,
    needs: tuple[IndexMap, ...],
) -> tuple[list[_Dimension], list[int], list[int]]:
    """Return a plan's dimensions, and the rank's source part and target part along each of them."""
    dimensions = [
        _Dimension(n, s, topology.parts(s), m.output_size(n), t, topology.parts(t), m)
        for n, s, t, m in zip(shape, source, target, needs, strict=True)
    ]
    here = topology.coordinates(rank)
    return (
        dimensions,
        [topology.part(here, d.source_axes) for d in dimensions],
        [topology.part(here, d.target_axes) for d in dimensions],
    )


def _coordinates(topology: Topology, cuts: Cuts, parts: tuple[int, ...]) -> dict[str, int]:
    coordinates: dict[str, int] = {}
    for axes, part in zip(cuts, parts, strict=True):
        coordinates |= topology.unravel(part, axes)
    return coordinates


def _targets(
    topology: Topology,
    rank: int,
    dimensions: list[_Dimension],
    source_here: list[int],
    source: Cuts,
    target: Cuts,
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the ranks that receive elements from `rank`, with the numbers of their target parts.

    There is one target part per dimension; `source_here` has the source parts of `rank`. A rank
    receives from the replica with its own coordinates along the grid axes that do not partition the
    input. So these coordinates are fixed to those of `rank`, and all others vary.
    """
    here, moving = topology.coordinates(rank), set(cutting_axes(source))
    free = _free_axes(source, target)
    places = zip(dimensions, source_here, strict=True)
    for chosen in product(*(_takers(topology, here, moving, d, i) for d, i in places)):
        where = here | _coordinates(topology, target, chosen)
        for position in product(*(range(topology.extent(axis)) for axis in free)):
            yield topology.rank(where | dict(zip(free, position, strict=True))), chosen


def _takers(
    topology: Topology, here: Mapping[str, int], moving: Set[str], d: _Dimension, source: int
) -> list[int]:
    """Return the target parts along dimension `d` that need elements of part `source` of one rank.

    `here` are the coordinates of this rank; `moving` are the axes that partition the input. Only
    ranks with the same coordinates along all other axes receive elements from this rank.
    """
    fixed = [axis for axis in d.target_axes if axis not in moving]
    parts = []
    for j in sorted(d.targets(source)):
        where = topology.unravel(j, d.target_axes)
        if all(where[axis] == here[axis] for axis in fixed) and d.overlap(source, j):
            parts.append(j)
    return parts


def _free_axes(source: Cuts, target: Cuts) -> list[str]:
    """Return the axes that partition the input only; ranks along them need the same elements."""
    return [axis for axis in cutting_axes(source) if axis not in cutting_axes(target)]


def _boxes(
    dimensions: list[_Dimension], source: Sequence[int], target: Sequence[int]
) -> tuple[tuple[Slices, Slices], ...]:
    """Return pairs of a box of the block and the box of the buffer that receives its elements.

    The block is at the parts `source`, the buffer at the parts `target`, one per dimension.
    """
    every = [d.taken(i, j) for d, i, j in zip(dimensions, source, target, strict=True)]
    return tuple(
        (
            tuple(slice(p.source, p.source + p.length) for p in pieces),
            tuple(slice(p.target, p.target + p.length) for p in pieces),
        )
        for pieces in product(*every)
    )


def _is_identity(needs: IndexMap, size: int) -> bool:
    """Return whether an index map is known to be the identity on `size` inputs.

    The result does not depend on the number of parts. Other maps, for which the result is False,
    may be the identity, too.
    """
    if isinstance(needs, Window):
        return (needs.kernel, needs.stride, needs.padding) == (1, 1, (0, 0))
    return needs in (Same(), AdaptiveWindow(size), Strided(0, 1, size))
