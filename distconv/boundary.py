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
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod
from typing import Any

from distconv.layout import block
from distconv.plan import Plan, Slices
from distconv.window import Window

Interval = tuple[int, int]


@dataclass(frozen=True)
class Part:
    """Elements of a slab that come with one message, `box` of `shape` from `start` on."""

    message: int
    start: int
    shape: tuple[int, ...]
    box: Slices
    place: Slices

    def of(self, messages: Sequence[Any]) -> Any:
        """The array that the message holds there."""
        return messages[self.message][self.start : self.start + prod(self.shape)].view(self.shape)


@dataclass(frozen=True)
class Slab:
    """Halos along one side of the block, as an input of the operator, and what they contribute to.

    The taps are slices of the kernel, after its first two dimensions; with `padding` they make of
    the inputs just the outputs. What `halo` does not fill of the inputs is zero.
    """

    dimension: int
    outputs: Slices
    shape: tuple[int, ...]
    taps: Slices
    padding: tuple[int, ...]
    halo: tuple[Part, ...]

    @cached_property
    def whole(self) -> bool:
        """Whether one message is the inputs as they are."""
        return (
            len(self.halo) == 1
            and self.halo[0].shape == self.shape
            and all(
                s.stop - s.start == n for s, n in zip(self.halo[0].place, self.shape, strict=True)
            )
        )


@dataclass(frozen=True)
class Boundary:
    """How an operator runs on a rank's own block, and the slabs that then are missing."""

    padding: tuple[int, ...]
    """What the operator pads the block with, on both sides of each spatial dimension."""
    buffer_padding: tuple[int, ...]
    """What it would pad the plan's buffer with: nothing along a cut dimension."""
    slabs: tuple[Slab, ...]


@lru_cache(maxsize=4096)
def reaches(
    windows: tuple[Window, ...], sizes: tuple[int, ...], parts: tuple[int, ...]
) -> bool | None:
    """Whether any part's windows reach beyond its own inputs; None where that is not the question.

    The operator has to make of every part's own inputs just its own outputs, with some padding
    equal on both sides, and most of the outputs have to be right already.

    Parameters
    ----------
    sizes, parts: inputs along each spatial dimension, and how many parts they are cut into.
    """
    found = False
    for window, size, n in zip(windows, sizes, parts, strict=True):
        if n == 1:
            if window.padding[0] != window.padding[1] or window.ceil_mode:
                return None
            continue
        outputs = window.output_size(size)
        for j in range(n):
            own, made = block(size, n, j), block(outputs, n, j)
            count = made[1] - made[0]
            padding = _own_padding(window, own, made)
            room = own[1] - own[0] + 2 * padding - window.extent
            if padding < 0 or room < 0 or room // window.stride + 1 != count:
                return None
            low, high = _inner(window, size, own, made)
            if 2 * (high - low) < count:
                return None
            found |= high - low < count
    return found


def _own_padding(window: Window, own: Interval, made: Interval) -> int:
    """How far the first window begins before the own inputs."""
    return window.padding[0] + own[0] - made[0] * window.stride


def _inner(window: Window, size: int, own: Interval, made: Interval) -> Interval:
    """The outputs that need no halo, counted from the first that is made of the own inputs."""
    count = made[1] - made[0]
    padding = _own_padding(window, own, made)
    low = min(-(-padding // window.stride), count) if own[0] > 0 else 0
    if own[1] == size:
        return low, count
    high = (padding + own[1] - own[0] - window.extent) // window.stride + 1
    return low, min(max(low, high), count)


@dataclass(frozen=True)
class _Side:
    """One dimension of a slab: its inputs in the buffer, outputs, taps and padding."""

    inputs: Interval
    halo: Interval
    """Of the inputs, those that are not left to be zero."""
    outputs: Interval
    taps: Interval
    padding: int = 0


def boundary(
    plan: Plan,
    windows: tuple[Window, ...],
    sizes: tuple[int, ...],
    inputs: tuple[Interval, ...],
    outputs: tuple[Interval, ...],
    cut: tuple[bool, ...],
) -> Boundary:
    """The boundary of one rank's block, of which `reaches` is not None.

    Parameters
    ----------
    plan: of gathering what the outputs need, cut dimensions by their windows.
    sizes: of the input's spatial dimensions.
    inputs, outputs: the intervals that the rank holds, per spatial dimension.
    cut: which spatial dimensions are.
    """
    rows = list(zip(windows, sizes, inputs, outputs, cut, strict=True))
    own: list[_Side] = []
    """Of every dimension: the own inputs, with padding around."""
    every: list[_Side] = []
    """All inputs that there are, halos too."""
    for w, n, held, made, c in rows:
        count, taps = made[1] - made[0], (0, w.kernel)
        if c:
            padding = _own_padding(w, held, made)
            reach = (count - 1) * w.stride + w.extent
            inside = padding, min(padding + held[1] - held[0], reach)
        else:
            padding, reach, inside = w.padding[0], n, (0, n)
        own.append(_Side(inside, inside, (0, count), taps, padding))
        every.append(_Side((0, reach), (0, reach), (0, count), taps, 0 if c else padding))
    slabs = []
    for e, (w, n, held, made, c) in enumerate(rows):
        for side in _sides(w, n, held, made, own[e].inputs) if c else ():
            sides = [*own[:e], side, *every[e + 1 :]]
            slab = _slab(plan, e + 2, sides)
            if slab.halo:
                slabs.append(slab)
    return Boundary(
        padding=tuple(side.padding for side in own),
        buffer_padding=tuple(side.padding for side in every),
        slabs=tuple(slabs),
    )


def _sides(w: Window, size: int, held: Interval, made: Interval, own: Interval) -> list[_Side]:
    """The halos before and after the own inputs of one dimension."""
    low, high = _inner(w, size, held, made)
    count = made[1] - made[0]
    sides = []
    if low:
        taps = min(-(-own[0] // w.dilation), w.kernel)
        stop = (low - 1) * w.stride + (taps - 1) * w.dilation + 1
        sides.append(_Side((0, stop), (0, own[0]), (0, low), (0, taps)))
    if high < count:
        first = max(-(-(own[1] - (count - 1) * w.stride) // w.dilation), 0)
        start = high * w.stride + first * w.dilation
        reach = (count - 1) * w.stride + w.extent
        sides.append(_Side((start, reach), (own[1], reach), (high, count), (first, w.kernel)))
    return sides


def _slab(plan: Plan, dimension: int, sides: Sequence[_Side]) -> Slab:
    lead = [(0, n) for n in plan.buffer_shape[:2]]
    covered = lead + [side.inputs for side in sides]
    filled = lead + [side.halo for side in sides]
    halo = []
    for message, route in enumerate(plan.receives):
        shapes = [tuple(s.stop - s.start for s in box) for box in route.boxes]
        starts = accumulate((prod(shape) for shape in shapes), initial=0)
        for box, shape, start in zip(route.boxes, shapes, starts, strict=False):
            meeting = _meeting(box, filled, covered)
            if meeting is not None:
                halo.append(Part(message, start, shape, *meeting))
    everything = (slice(None), slice(None))
    return Slab(
        dimension=dimension,
        outputs=(*everything, *(slice(*side.outputs) for side in sides)),
        shape=tuple(b - a for a, b in covered),
        taps=(*everything, *(slice(*side.taps) for side in sides)),
        padding=tuple(side.padding for side in sides),
        halo=tuple(halo),
    )


def _meeting(
    box: Slices, filled: Sequence[Interval], covered: Sequence[Interval]
) -> tuple[Slices, Slices] | None:
    """What of a box is to be filled: as a place in the box, and in what is covered."""
    pairs = zip(box, filled, covered, strict=True)
    both = [(max(s.start, a, c), min(s.stop, b, e)) for s, (a, b), (c, e) in pairs]
    if any(a >= b for a, b in both):
        return None
    inside = (slice(a - s.start, b - s.start) for (a, b), s in zip(both, box, strict=True))
    place = (slice(a - c, b - c) for (a, b), (c, _) in zip(both, covered, strict=True))
    return tuple(inside), tuple(place)
