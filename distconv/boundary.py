"""The boundary of a block of outputs: the windows that reach beyond the block of inputs.

Most windows of a rank's outputs lie within the inputs that it owns, and need no messages. The
others lie in slabs along the sides of the block. A slab at a corner belongs to the first of its
dimensions, so that the slabs do not overlap.

Index arithmetic only. Positions of inputs are those of the plan's buffer, which begins where the
first window does, in the padding if need be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any

from distconv.layout import block
from distconv.plan import Plan, Slices
from distconv.window import Window


@dataclass(frozen=True)
class Part:
    """Elements of a piece that come with one message, `box` of `shape` from `start` on."""

    message: int
    start: int
    shape: tuple[int, ...]
    box: Slices
    place: Slices

    def of(self, messages: Sequence[Any]) -> Any:
        """The array that the message holds there."""
        return messages[self.message][self.start : self.start + prod(self.shape)].view(self.shape)


@dataclass(frozen=True)
class Piece:
    """A slab of outputs, and the box of inputs that their windows cover.

    `own` pairs boxes of the rank's block with places in the piece; `halo` says what else comes from
    which message. The rest of the piece is padding.
    """

    outputs: Slices
    shape: tuple[int, ...]
    own: tuple[tuple[Slices, Slices], ...]
    halo: tuple[Part, ...]


@dataclass(frozen=True)
class Boundary:
    """How a windowed operator runs on a rank's own block, and what is left to its pieces."""

    padding: tuple[int, ...]
    """What the operator pads the block with, on both sides of each spatial dimension."""
    piece_padding: tuple[int, ...]
    """What it pads a piece with: nothing along a cut dimension."""
    pieces: tuple[Piece, ...]


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
            padding = _own_padding(window, own[0], made[0])
            room = own[1] - own[0] + 2 * padding - window.extent
            if padding < 0 or room < 0 or room // window.stride + 1 != count:
                return None
            low, high = _inner(window, size, own, made)
            if 2 * (high - low) < count:
                return None
            found |= high - low < count
    return found


def _own_padding(window: Window, first: int, start: int) -> int:
    """How far the window of output `start` begins before input `first`."""
    return window.padding[0] + first - start * window.stride


def _inner(
    window: Window, size: int, own: tuple[int, int], made: tuple[int, int]
) -> tuple[int, int]:
    """The outputs that need no halo, counted from the first that is made of the own inputs."""
    count = made[1] - made[0]
    padding = _own_padding(window, own[0], made[0])
    low = min(-(-padding // window.stride), count) if own[0] > 0 else 0
    if own[1] == size:
        return low, count
    high = (padding + own[1] - own[0] - window.extent) // window.stride + 1
    return low, min(max(low, high), count)


def boundary(
    plan: Plan,
    windows: tuple[Window, ...],
    sizes: tuple[int, ...],
    inputs: tuple[tuple[int, int], ...],
    outputs: tuple[tuple[int, int], ...],
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
    inner = [_inner(w, n, i, o) if c else (0, o[1] - o[0]) for w, n, i, o, c in rows]
    lead = plan.buffer_shape[:2]
    pieces = []
    for d, (_, _, _, (start, stop), c) in enumerate(rows):
        if not c:
            continue
        for side in ((0, inner[d][0]), (inner[d][1], stop - start)):
            spans = [
                inner[e] if e < d else side if e == d else (0, rows[e][3][1] - rows[e][3][0])
                for e in range(len(rows))
            ]
            if all(a < b for a, b in spans):
                covered = [
                    (a * w.stride, (b - 1) * w.stride + w.extent) if c else (0, n)
                    for (a, b), (w, n, _, _, c) in zip(spans, rows, strict=True)
                ]
                pieces.append(_piece(plan, spans, [(0, n) for n in lead] + covered))
    return Boundary(
        padding=tuple(_own_padding(w, i[0], o[0]) if c else w.padding[0] for w, _, i, o, c in rows),
        piece_padding=tuple(0 if c else w.padding[0] for w, _, _, _, c in rows),
        pieces=tuple(pieces),
    )


def _piece(
    plan: Plan, spans: Sequence[tuple[int, int]], covered: Sequence[tuple[int, int]]
) -> Piece:
    own = []
    for source, target in plan.own:
        meeting = _meeting(target, covered)
        if meeting is not None:
            inside, place = meeting
            offset = [s.start for s in source]
            taken = tuple(
                slice(s.start + o, s.stop + o) for s, o in zip(inside, offset, strict=True)
            )
            own.append((taken, place))
    halo = []
    for message, route in enumerate(plan.receives):
        shapes = [tuple(s.stop - s.start for s in box) for box in route.boxes]
        starts = accumulate((prod(shape) for shape in shapes), initial=0)
        for box, shape, start in zip(route.boxes, shapes, starts, strict=False):
            meeting = _meeting(box, covered)
            if meeting is not None:
                halo.append(Part(message, start, shape, *meeting))
    return Piece(
        outputs=(slice(None), slice(None), *(slice(a, b) for a, b in spans)),
        shape=tuple(b - a for a, b in covered),
        own=tuple(own),
        halo=tuple(halo),
    )


def _meeting(box: Slices, covered: Sequence[tuple[int, int]]) -> tuple[Slices, Slices] | None:
    """Where a box of the buffer meets a covered one: as places in the box, and in the other."""
    low = [max(s.start, a) for s, (a, _) in zip(box, covered, strict=True)]
    high = [min(s.stop, b) for s, (_, b) in zip(box, covered, strict=True)]
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return None
    inside = (slice(a - s.start, b - s.start) for a, b, s in zip(low, high, box, strict=True))
    place = (slice(a - c, b - c) for a, b, (c, _) in zip(low, high, covered, strict=True))
    return tuple(inside), tuple(place)
