"""Slabs of halos along the sides of a block, and the messages that their elements come from.

Index arithmetic only. Positions of inputs are counted in the plan's buffer, which begins where the
first window does, in the padding if need be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod
from typing import Any

from distconv.geometry.index_maps import Interval, Same
from distconv.geometry.layout import Cuts, block, distinct_parts, rank_box
from distconv.geometry.plan import Plan, Slices, make_plan, pieces_along
from distconv.geometry.topology import Topology


@dataclass(frozen=True)
class LocalInput:
    """The shape of an input of the local operator, and the arguments with which it is called.

    `padding` is added on both sides of each spatial dimension. For a transposed convolution,
    `padding` and `extra` are torch's padding and output padding.
    """

    shape: tuple[int, ...]
    padding: tuple[int, ...]
    extra: tuple[int, ...]
    crop: tuple[Interval, ...] | None = None
    """The number of surplus results before and after in each dimension; None if there are none."""
    flat: int | None = None
    """A dimension of a volume that has one element in inputs, outputs and kernel alike; or None."""


@dataclass(frozen=True)
class MessagePart:
    """Elements of a slab that arrive in one message, and their place in the slab.

    The message of number `message` contains, from its element `start` on, a box of `shape`. The
    part `box` of it is copied to `place` of the slab.
    """

    message: int
    start: int
    shape: tuple[int, ...]
    box: Slices
    place: Slices
    alone: bool
    """Whether the message holds nothing else."""

    @cached_property
    def fills(self) -> bool:
        """Return whether the part is its whole message."""
        return self.alone and self.shape == tuple(s.stop - s.start for s in self.box)

    def of(self, messages: Any) -> Any:
        """Return the message of this part, one of `messages`, as a box of `shape`."""
        message = messages[self.message]
        if self.alone:
            return message
        return message[self.start : self.start + prod(self.shape)].view(self.shape)


@dataclass(frozen=True)
class HaloSlab:
    """Halos along one side of the block, as an input of the operator, and the outputs they add to.

    The taps are slices of the kernel, after its first two dimensions. With these taps the operator
    computes exactly these outputs from the halos. Inputs that `halo` does not fill are zero.
    """

    piece: LocalInput
    outputs: Slices
    taps: Slices
    halo: tuple[MessagePart, ...]

    @cached_property
    def whole(self) -> MessagePart | None:
        """Return the message part that is the slab's whole input, and needs no copy; or None."""
        part = self.halo[0]
        return part if part.fills and part.shape == self.piece.shape else None

    @cached_property
    def pieces(self) -> tuple[int, tuple[int | tuple[int, ...], ...]] | None:
        """Return `pieces_along` of the slab's message parts."""
        return pieces_along(self.piece.shape, [part.place for part in self.halo])


@dataclass(frozen=True)
class Boundary:
    """One rank's data for computing while halos travel: plan, own block, and halo slabs."""

    plan: Plan
    own: LocalInput
    buffer: LocalInput
    """The assembled inputs, from which the operator computes the same outputs in one call."""
    slabs: tuple[HaloSlab, ...]
    crop: tuple[Interval, ...] | None = None
    """The surplus results of the own block, before and after; see `LocalInput`."""

    @cached_property
    def composed(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return number and shape of each message whose parts are in several slabs, or places."""
        filled = {part.message for slab in self.slabs for part in slab.halo if part.fills}
        shapes = enumerate(route.shape for route in self.plan.receives)
        return tuple((i, shape) for i, shape in shapes if i not in filled)


@dataclass(frozen=True)
class SlabExtent:
    """Intervals (start, stop) and arguments of one call of the local operator along one dimension.

    For `make_boundary`, inputs are positions in the plan's buffer, outputs in the rank's block.
    """

    inputs: Interval
    halo: Interval
    """The inputs that halos fill; the others are zero."""
    outputs: Interval
    taps: Interval
    padding: int = 0
    extra: int = 0
    crop: Interval = (0, 0)


@lru_cache(maxsize=4096)
def any_halo(
    count: Callable[..., int | None],
    maps: tuple[Any, ...],
    sizes: tuple[int, ...],
    parts: tuple[int, ...],
) -> bool | None:
    """Return whether any part of an operator needs halos; None if it should not overlap.

    To overlap is to compute on the own block while halos travel. It is impossible if the local
    operator cannot compute a part's outputs from its inputs alone, and too slow if more than half
    of a part's outputs need halos.

    Parameters
    ----------
    count: takes the index map and size of a dimension, and a part's intervals of inputs and of
        outputs. Returns the number of the part's outputs that need halos, or None if overlapping is
        impossible.
    maps: the index map of each spatial dimension.
    sizes: the number of inputs along each spatial dimension.
    parts: the number of parts into which each spatial dimension is cut.
    """
    found = False
    for m, size, n in zip(maps, sizes, parts, strict=True):
        outputs = m.output_size(size)
        for j in distinct_parts(size, outputs, n, m.steps):
            start, stop = block(outputs, n, j)
            touched = count(m, size, block(size, n, j), (start, stop))
            # It has to be worth while: at least half of the outputs need no halo.
            if touched is None or 2 * touched > stop - start:
                return None
            found |= touched > 0
    return found


@lru_cache(maxsize=4096)
def make_boundary(
    extents: Callable[..., tuple[Any, ...]],
    topology: Topology,
    rank: int,
    shape: tuple[int, ...],
    made: tuple[int, ...],
    cuts: Cuts,
    maps: tuple[Any, ...],
) -> Boundary:
    """Return the boundary of one rank's block, for an operator that can overlap.

    Operators for which `any_halo` returns None cannot.

    Parameters
    ----------
    extents: takes the index map and size of a dimension, the rank's intervals of inputs and of
        outputs, and whether the dimension is cut. Returns a `SlabExtent` of the rank's block, at
        any positions; one of the block's elements in the buffer; one of the whole buffer; and a
        list with one for each side that has a halo.
    shape, made: the global shapes of input and output, both cut by `cuts`.
    maps: the index map of each spatial dimension.
    """
    cut = [bool(axes) for axes in cuts[2:]]
    needs = (m if c else Same() for m, c in zip(maps, cut, strict=True))
    plan = make_plan(topology, rank, shape, cuts, cuts, (Same(), Same(), *needs))
    own, out = (rank_box(s, cuts, topology, rank) for s in (shape, made))
    inputs, outputs = (zip(b.start[2:], b.stop[2:], strict=True) for b in (own, out))
    rows = map(extents, maps, shape[2:], inputs, outputs, cut)
    whole, inside, every, sides = zip(*rows, strict=True)
    of_block = local_input(plan, whole)
    return Boundary(
        plan,
        replace(of_block, shape=plan.block_shape, crop=None),
        local_input(plan, every),
        halo_slabs(plan, inside, every, sides),
        of_block.crop,
    )


def halo_slabs(
    plan: Plan,
    own: Sequence[SlabExtent],
    every: Sequence[SlabExtent],
    sides: Sequence[Sequence[SlabExtent]],
) -> tuple[HaloSlab, ...]:
    """Return the halo slabs on each side of each dimension.

    Along earlier dimensions a slab is as long as the own inputs; along later ones it includes the
    corners.

    Parameters
    ----------
    own, every: `SlabExtent`s of the rank's own inputs, and of the whole buffer, along each spatial
        dimension.
    sides: `SlabExtent`s of the halos on both sides, for each spatial dimension.
    """
    everything = (slice(None), slice(None))
    found = []
    for d, of_dimension in enumerate(sides):
        for side in of_dimension:
            across = [*own[:d], side, *every[d + 1 :]]
            halo = message_parts(plan, [s.halo for s in across], [s.inputs for s in across])
            single = all(b - a == 1 for a, b in (side.inputs, side.outputs, side.taps))
            flat = d + 2 if len(across) == 3 and single else None
            if halo:
                outputs, taps = (
                    (*everything, *(slice(*i) for i in intervals))
                    for intervals in ([s.outputs for s in across], [s.taps for s in across])
                )
                found.append(
                    HaloSlab(replace(local_input(plan, across), flat=flat), outputs, taps, halo)
                )
    return tuple(found)


def local_input(plan: Plan, sides: Sequence[SlabExtent]) -> LocalInput:
    """Return the operator's input with these spatial extents, and all samples and channels."""
    return LocalInput(
        shape=(*plan.buffer_shape[:2], *(s.inputs[1] - s.inputs[0] for s in sides)),
        padding=tuple(s.padding for s in sides),
        extra=tuple(s.extra for s in sides),
        crop=tuple(s.crop for s in sides) if any(s.crop != (0, 0) for s in sides) else None,
    )


def message_parts(
    plan: Plan, filled: Sequence[Interval], covered: Sequence[Interval]
) -> tuple[MessagePart, ...]:
    """Return the parts of messages that lie in the intervals `filled` of the buffer.

    `covered` are the intervals of the buffer that the slab covers; the places of the parts are
    counted from their starts.
    """
    found = []
    for message, route in enumerate(plan.receives):
        shapes = [tuple(s.stop - s.start for s in box) for box in route.boxes]
        starts = accumulate((prod(shape) for shape in shapes), initial=0)
        for box, shape, start in zip(route.boxes, shapes, starts, strict=False):
            meeting = intersection(box, filled, covered)
            if meeting is not None:
                alone = len(route.boxes) == 1
                found.append(MessagePart(message, start, shape, *meeting, alone))
    return tuple(found)


def intersection(
    box: Slices, filled: Sequence[Interval], covered: Sequence[Interval]
) -> tuple[Slices, Slices] | None:
    """Return the intersection of `box` with two lists of spatial intervals, all in one buffer.

    The first result indexes the box, the second an array of the extent of `covered`. Returns None
    if the intersection is empty.
    """
    lead = [(s.start, s.stop) for s in box[:2]]
    pairs = zip(box, [*lead, *filled], [*lead, *covered], strict=True)
    both = [(max(s.start, a, c), min(s.stop, b, e)) for s, (a, b), (c, e) in pairs]
    if any(a >= b for a, b in both):
        return None
    starts = [0, 0, *(a for a, _ in covered)]
    inside = (slice(a - s.start, b - s.start) for (a, b), s in zip(both, box, strict=True))
    place = (slice(a - c, b - c) for (a, b), c in zip(both, starts, strict=True))
    return tuple(inside), tuple(place)
