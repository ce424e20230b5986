"""The boundary of a block of outputs: what halos contribute to windows that reach beyond the block.

A linear windowed operator is the sum of what it makes of a rank's own inputs, with zeros around
them, and of its halos. The halos lie in slabs along the sides of the own block, and touch a few
outputs, through a few taps of the kernel. A corner belongs to the first of its dimensions, so that
no element counts twice.

Index arithmetic only. Positions of inputs are those of the plan's buffer, which begins where the
first window does, in the padding if need be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod
from typing import Any

from distconv.layout import Cuts, block, rank_box
from distconv.plan import Plan, Slices, make_plan
from distconv.topology import Topology
from distconv.window import Interval, Same, Window


@dataclass(frozen=True)
class Piece:
    """Some of the inputs, and how the local operator runs on them.

    `padding` is on both sides of each spatial dimension; of a transposed convolution, it and
    `extra` are what torch calls padding and output padding.
    """

    shape: tuple[int, ...]
    kernel: tuple[int, ...]
    padding: tuple[int, ...]
    extra: tuple[int, ...]
    crop: tuple[Interval, ...] | None = None
    """How many of the results are too many, before and after; None where there are none."""
    flat: int | None = None
    """A dimension of a volume that has one element in inputs, outputs and kernel alike."""


@dataclass(frozen=True)
class Part:
    """Elements of a slab that come with one message, `box` of `shape` from `start` on."""

    message: int
    start: int
    shape: tuple[int, ...]
    box: Slices
    place: Slices
    alone: bool
    """Whether the message holds nothing else."""

    def of(self, messages: Any) -> Any:
        """The array that its message, of all of them by number, holds there."""
        message = messages[self.message]
        if not self.alone:
            message = message[self.start : self.start + prod(self.shape)]
        return message.view(self.shape)


@dataclass(frozen=True)
class Slab:
    """Halos along one side of the block, as an input of the operator, and what they contribute to.

    The taps are slices of the kernel, after its first two dimensions; with them the piece makes
    just the outputs. What `halo` does not fill of the inputs is zero.
    """

    piece: Piece
    outputs: Slices
    taps: Slices
    halo: tuple[Part, ...]

    @cached_property
    def whole(self) -> Part | None:
        """The one part that is the inputs as they are, and all of its message, if there is one."""
        part, shape = self.halo[0], self.piece.shape
        covered = tuple(s.stop - s.start for s in part.place)
        return part if part.alone and part.shape == covered == shape else None


@dataclass(frozen=True)
class Boundary:
    """What a rank exchanges, how an operator runs on its block, and the slabs that are missing."""

    plan: Plan
    own: Piece
    buffer: Piece
    """The inputs assembled, from which the operator makes the same outputs by itself."""
    slabs: tuple[Slab, ...]
    crop: tuple[Interval, ...] | None = None
    """What is too much of what the operator makes of the block, as in a piece."""

    @cached_property
    def composed(self) -> tuple[tuple[int, int], ...]:
        """The messages that are not the halos of one slab as they are, and their sizes."""
        whole = {slab.whole.message for slab in self.slabs if slab.whole is not None}
        sizes = enumerate(route.size for route in self.plan.receives)
        return tuple((i, size) for i, size in sizes if i not in whole)


@dataclass(frozen=True)
class Side:
    """One dimension of a piece: its inputs in the buffer, and how the operator runs along it."""

    inputs: Interval
    halo: Interval
    """Of the inputs, those that are not left to be zero."""
    outputs: Interval
    taps: Interval
    padding: int = 0
    extra: int = 0
    crop: Interval = (0, 0)


@lru_cache(maxsize=4096)
def reaches(
    windows: tuple[Window, ...],
    sizes: tuple[int, ...],
    parts: tuple[int, ...],
    *,
    pooled: bool = False,
    ceil_mode: bool = False,
) -> bool | None:
    """Whether any part's windows reach beyond its own inputs; None where that is not the question.

    The operator has to make of every part's own inputs just its own outputs, with some padding
    equal on both sides, and most of the outputs have to be right already.

    Parameters
    ----------
    sizes, parts: inputs along each spatial dimension, and how many parts they are cut into.
    pooled: whether the local operator is one of torch's poolings, which pad by no more than half
        the kernel.
    ceil_mode: whether it makes outputs of windows that begin before the padded inputs end.
    """
    found = False
    for window, size, n in zip(windows, sizes, parts, strict=True):
        outputs = window.output_size(size)
        if n == 1:
            own_window = replace(window, ceil_mode=ceil_mode)
            if window.padding[0] != window.padding[1] or own_window.output_size(size) != outputs:
                return None
            continue
        for j in range(n):
            own, made = block(size, n, j), block(outputs, n, j)
            count, held = made[1] - made[0], own[1] - own[0]
            padding = own_padding(window, own, made)
            if padding < 0 or held + 2 * padding < window.extent:
                return None
            if pooled and (padding > window.kernel // 2 or held < window.dilation):
                return None
            own_window = replace(window, padding=(padding, padding), ceil_mode=ceil_mode)
            if own_window.output_size(held) != count:
                return None
            low, high = inner(window, size, own, made)
            if 2 * (high - low) < count:
                return None
            found |= high - low < count
    return found


def own_padding(window: Window, own: Interval, made: Interval) -> int:
    """How far the first window begins before the own inputs."""
    return window.padding[0] + own[0] - made[0] * window.stride


def inner(window: Window, size: int, own: Interval, made: Interval) -> Interval:
    """The outputs that need no halo, counted from the first that is made of the own inputs."""
    count = made[1] - made[0]
    padding = own_padding(window, own, made)
    low = min(-(-padding // window.stride), count) if own[0] > 0 else 0
    if own[1] == size:
        return low, count
    high = (padding + own[1] - own[0] - window.extent) // window.stride + 1
    return low, min(max(low, high), count)


@lru_cache(maxsize=4096)
def boundary(
    topology: Topology,
    rank: int,
    shape: tuple[int, ...],
    made: tuple[int, ...],
    cuts: Cuts,
    windows: tuple[Window, ...],
) -> Boundary:
    """The boundary of one rank's block, of which `reaches` is not None.

    Parameters
    ----------
    shape, made: the global shapes of input and output, both cut by `cuts`.
    windows: one for each spatial dimension.
    """
    plan, rows = placed(topology, rank, shape, made, cuts, windows)
    own, every, sides = [], [], []
    for w, n, held, outputs, c in rows:
        count, taps = outputs[1] - outputs[0], (0, w.kernel)
        if c:
            padding = own_padding(w, held, outputs)
            reach = (count - 1) * w.stride + w.extent
            inside = padding, min(padding + held[1] - held[0], reach)
        else:
            padding, reach, inside = w.padding[0], n, (0, n)
        own.append(Side(inside, inside, (0, count), taps, padding))
        every.append(Side((0, reach), (0, reach), (0, count), taps, 0 if c else padding))
        sides.append(_sides(w, n, held, outputs, inside) if c else [])
    return Boundary(
        plan,
        replace(piece(plan, own), shape=plan.block_shape),
        piece(plan, every),
        slabs(plan, own, every, sides),
    )


Row = tuple[Any, int, Interval, Interval, bool]
"""Of one dimension: its map, size, the inputs and outputs that a rank holds, whether it is cut."""


def placed(
    topology: Topology,
    rank: int,
    shape: tuple[int, ...],
    made: tuple[int, ...],
    cuts: Cuts,
    maps: Sequence[Any],
) -> tuple[Plan, list[Row]]:
    """The plan of what a rank needs along the dimensions that are cut, and every spatial one."""
    cut = [bool(axes) for axes in cuts[2:]]
    needs = (m if c else Same() for m, c in zip(maps, cut, strict=True))
    plan = make_plan(topology, rank, shape, cuts, cuts, (Same(), Same(), *needs))
    own, out = (rank_box(s, cuts, topology, rank) for s in (shape, made))
    inputs, outputs = (zip(b.start[2:], b.stop[2:], strict=True) for b in (own, out))
    return plan, list(zip(maps, shape[2:], inputs, outputs, cut, strict=True))


def _sides(w: Window, size: int, held: Interval, made: Interval, own: Interval) -> list[Side]:
    """The halos before and after the own inputs of one dimension."""
    low, high = inner(w, size, held, made)
    count = made[1] - made[0]
    sides = []
    if low:
        taps = min(-(-own[0] // w.dilation), w.kernel)
        stop = (low - 1) * w.stride + (taps - 1) * w.dilation + 1
        sides.append(Side((0, stop), (0, own[0]), (0, low), (0, taps)))
    if high < count:
        first = max(-(-(own[1] - (count - 1) * w.stride) // w.dilation), 0)
        start = high * w.stride + first * w.dilation
        reach = (count - 1) * w.stride + w.extent
        sides.append(Side((start, reach), (own[1], reach), (high, count), (first, w.kernel)))
    return sides


def slabs(
    plan: Plan, own: Sequence[Side], every: Sequence[Side], sides: Sequence[Sequence[Side]]
) -> tuple[Slab, ...]:
    """The slabs on each of the sides of each dimension.

    Along the dimensions before theirs they are as long as the own inputs, along those that follow
    they have corners.
    """
    everything = (slice(None), slice(None))
    found = []
    for d, of_dimension in enumerate(sides):
        for side in of_dimension:
            across = [*own[:d], side, *every[d + 1 :]]
            halo = parts_of(plan, [s.halo for s in across], [s.inputs for s in across])
            single = all(b - a == 1 for a, b in (side.inputs, side.outputs, side.taps))
            flat = d + 2 if len(across) == 3 and single else None
            if halo:
                outputs, taps = (
                    (*everything, *(slice(*i) for i in intervals))
                    for intervals in ([s.outputs for s in across], [s.taps for s in across])
                )
                found.append(Slab(replace(piece(plan, across), flat=flat), outputs, taps, halo))
    return tuple(found)


def piece(plan: Plan, sides: Sequence[Side]) -> Piece:
    """The piece with these sides, and all channels and samples of the rank."""
    return Piece(
        shape=(*plan.buffer_shape[:2], *(s.inputs[1] - s.inputs[0] for s in sides)),
        kernel=tuple(s.taps[1] - s.taps[0] for s in sides),
        padding=tuple(s.padding for s in sides),
        extra=tuple(s.extra for s in sides),
        crop=tuple(s.crop for s in sides) if any(s.crop != (0, 0) for s in sides) else None,
    )


def parts_of(
    plan: Plan, filled: Sequence[Interval], covered: Sequence[Interval]
) -> tuple[Part, ...]:
    """The elements of messages that are to be `filled` of what is `covered` of the buffer."""
    found = []
    for message, route in enumerate(plan.receives):
        shapes = [tuple(s.stop - s.start for s in box) for box in route.boxes]
        starts = accumulate((prod(shape) for shape in shapes), initial=0)
        for box, shape, start in zip(route.boxes, shapes, starts, strict=False):
            meeting = meeting_of(box, filled, covered)
            if meeting is not None:
                alone = len(route.boxes) == 1
                found.append(Part(message, start, shape, *meeting, alone))
    return tuple(found)


def meeting_of(
    box: Slices, filled: Sequence[Interval], covered: Sequence[Interval]
) -> tuple[Slices, Slices] | None:
    """What of a box is to be filled: as a place in the box, and in what is covered."""
    lead = [(s.start, s.stop) for s in box[:2]]
    pairs = zip(box, [*lead, *filled], [*lead, *covered], strict=True)
    both = [(max(s.start, a, c), min(s.stop, b, e)) for s, (a, b), (c, e) in pairs]
    if any(a >= b for a, b in both):
        return None
    starts = [0, 0, *(a for a, _ in covered)]
    inside = (slice(a - s.start, b - s.start) for (a, b), s in zip(both, box, strict=True))
    place = (slice(a - c, b - c) for (a, b), c in zip(both, starts, strict=True))
    return tuple(inside), tuple(place)
