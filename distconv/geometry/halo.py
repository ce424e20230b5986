"""Halo exchanges of convolutions: the outputs that need halos, and the halos that they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod
from typing import Any

from distconv.geometry.index_maps import Interval, Same, TransposedWindow, Window
from distconv.geometry.layout import Cuts, block, distinct_parts, rank_box
from distconv.geometry.plan import Plan, Slices, make_plan, pieces_along
from distconv.geometry.topology import Topology

# Slabs of halos along the sides of a block, and the messages that contain their elements.
#
# Index arithmetic only. Positions of inputs are counted in the plan's buffer, which begins where
# the first window does, in the padding if need be.


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
    """The numbers of surplus outputs before and after the needed outputs, in each spatial
    dimension; None if there are no surplus outputs."""
    flat: int | None = None
    """A dimension of a volume in which inputs, outputs and kernel have one element; or None."""


@dataclass(frozen=True)
class MessagePart:
    """Elements of a slab that are received in one message, and their place in the slab.

    From element `start` on, message number `message` contains a box with `shape`. The elements
    `box` of this box are copied to `place` of the slab.
    """

    message: int
    start: int
    shape: tuple[int, ...]
    box: Slices
    place: Slices
    alone: bool
    """Whether the message contains no other box."""

    @cached_property
    def fills(self) -> bool:
        """Return whether the part has all elements of its message."""
        return self.alone and self.shape == tuple(s.stop - s.start for s in self.box)

    def of(self, messages: Any) -> Any:
        """Return the box with `shape` of this part's message, one of the tensors `messages`."""
        message = messages[self.message]
        if self.alone:
            return message
        return message[self.start : self.start + prod(self.shape)].view(self.shape)


@dataclass(frozen=True)
class HaloSlab:
    """Halos along one side of a block, as an input of the operator, with their outputs.

    The contributions of the halos are added to `outputs`, a slice of the rank's output block. They
    are computed by the local operator from the input `piece`, with the slice `taps` of the kernel.
    The message parts `halo` fill the input; all other elements of the input are zero.
    """

    piece: LocalInput
    outputs: Slices
    taps: Slices
    halo: tuple[MessagePart, ...]

    @cached_property
    def whole(self) -> MessagePart | None:
        """Return the message part that is the slab's entire input, without a copy; or None."""
        part = self.halo[0]
        return part if part.fills and part.shape == self.piece.shape else None

    @cached_property
    def pieces(self) -> tuple[int, tuple[int | tuple[int, ...], ...]] | None:
        """Return a dimension along which message parts and padding concatenate to the input.

        Also return the part numbers and shapes of padding, in order; see `pieces_along`. Returns
        None if there is no such dimension.
        """
        return pieces_along(self.piece.shape, [part.place for part in self.halo])


@dataclass(frozen=True)
class Boundary:
    """One rank's plan, own input and halo slabs, to compute while halos are in flight."""

    plan: Plan
    own: LocalInput
    buffer: LocalInput
    """The input of block and halos together, from which one call computes the same outputs."""
    slabs: tuple[HaloSlab, ...]
    crop: tuple[Interval, ...] | None = None
    """The numbers of surplus outputs computed from the own block; see `LocalInput`."""

    @cached_property
    def composed(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return number and shape of each message that is not, as a whole, a part of one slab."""
        filled = {part.message for slab in self.slabs for part in slab.halo if part.fills}
        shapes = enumerate(route.shape for route in self.plan.receives)
        return tuple((i, shape) for i, shape in shapes if i not in filled)


@dataclass(frozen=True)
class SlabExtent:
    """Intervals (start, stop) and arguments of one call of the local operator along one dimension.

    For `make_boundary`, inputs are positions in the plan's buffer, outputs in the rank's block of
    outputs. `taps` are positions in the kernel. `padding`, `extra` and `crop` are as in
    `LocalInput`.
    """

    inputs: Interval
    halo: Interval
    """The inputs that halos fill; all other inputs are zero."""
    outputs: Interval
    taps: Interval
    padding: int = 0
    extra: int = 0
    crop: Interval = (0, 0)


Windows = tuple[Window | TransposedWindow, ...]
"""The index map of each spatial dimension: of a convolution, or of a transposed convolution."""


@lru_cache(maxsize=4096)
def needs_halo(maps: Windows, sizes: tuple[int, ...], parts: tuple[int, ...]) -> bool | None:
    """Return whether any rank needs halos; None if the operator should not overlap communication.

    To overlap is to compute on the own block while halos are in flight. Overlap is impossible if
    the local operator cannot compute the outputs of a part from the part's inputs, and too slow if
    more than half of a part's outputs need halos.

    Parameters
    ----------
    sizes: the number of inputs along each spatial dimension.
    parts: the number of parts into which each spatial dimension is partitioned.
    """
    found = False
    for m, size, n in zip(maps, sizes, parts, strict=True):
        transposed = isinstance(m, TransposedWindow)
        count: Any = _transposed_outputs_with_halo if transposed else _outputs_with_halo
        outputs = m.output_size(size)
        for j in distinct_parts(size, outputs, n, m.steps):
            start, stop = block(outputs, n, j)
            touched = count(m, size, block(size, n, j), (start, stop))
            # Overlap pays only if at least half of the outputs need no halo.
            if touched is None or 2 * touched > stop - start:
                return None
            found |= touched > 0
    return found


@lru_cache(maxsize=4096)
def make_boundary(
    topology: Topology,
    rank: int,
    shape: tuple[int, ...],
    made: tuple[int, ...],
    cuts: Cuts,
    maps: Windows,
) -> Boundary:
    """Return the boundary of one rank's block, for an operator that can overlap communication.

    `shape` and `made` are the global shapes of input and output, both partitioned by `cuts`. The
    index maps `maps` must be such that `needs_halo` does not return None.
    """
    extents: Any = _transposed_extents if isinstance(maps[0], TransposedWindow) else _extents
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
    """Return the halo slabs on both sides of each spatial dimension.

    A slab of dimension d is as long as the own inputs along dimensions before d, and as long as the
    buffer, corners included, along dimensions after d.

    Parameters
    ----------
    own, every: extents of the rank's own inputs, and of the entire buffer, along each spatial
        dimension.
    sides: extents of the halos on both sides, for each spatial dimension.
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
    """Return the operator's input with spatial extents `sides`, all samples and all channels."""
    return LocalInput(
        shape=(*plan.buffer_shape[:2], *(s.inputs[1] - s.inputs[0] for s in sides)),
        padding=tuple(s.padding for s in sides),
        extra=tuple(s.extra for s in sides),
        crop=tuple(s.crop for s in sides) if any(s.crop != (0, 0) for s in sides) else None,
    )


def message_parts(
    plan: Plan, filled: Sequence[Interval], covered: Sequence[Interval]
) -> tuple[MessagePart, ...]:
    """Return the parts of messages that are in the spatial intervals `filled` of the buffer.

    `covered` are the intervals of the buffer that the slab covers. The places of the parts are
    relative to the starts of `covered`.
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
    """Return the intersection of `box` with spatial intervals `filled` and `covered` of a buffer.

    The first result is relative to the start of `box`, the second to the starts of `covered`.
    Returns None if the intersection is empty.
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


# The boundary of a block of outputs, where windows reach beyond the rank's own inputs into halos.
#
# The result of a linear windowed operator is the sum of two results: that of a rank's own inputs,
# with zeros around them, and that of its halos. The halos form slabs along the sides of the own
# block, and contribute to a few outputs, through a few taps of the kernel. A corner belongs to the
# slab of its first dimension, so that no element is counted twice.
#
# The plan determines the inputs in the halos and the ranks that own them (`geometry.index_maps`,
# `geometry.plan`). Index arithmetic only. Positions of inputs are counted in the plan's buffer,
# which begins where the first window does, in the padding if need be.
#
# In the functions below, a part is one rank's part of one dimension with `size` inputs. `own` (or
# `held`) is the interval of the part's inputs, and `made` the interval of its outputs.


def _own_padding(window: Window, own: Interval, made: Interval) -> int:
    """Return the number of positions by which a part's first window begins before its inputs."""
    return window.padding[0] + own[0] - made[0] * window.stride


def _outputs_without_halo(window: Window, size: int, own: Interval, made: Interval) -> Interval:
    """Return the interval of a part's outputs that need no halo, relative to the first output."""
    count = made[1] - made[0]
    padding = _own_padding(window, own, made)
    low = min(-(-padding // window.stride), count) if own[0] > 0 else 0
    if own[1] == size:
        return low, count
    high = (padding + own[1] - own[0] - window.extent) // window.stride + 1
    return low, min(max(low, high), count)


def _outputs_with_halo(window: Window, size: int, own: Interval, made: Interval) -> int | None:
    """Return the number of a part's outputs that need halos; None if the part cannot overlap.

    A part can overlap if the operator, applied to the part's inputs with equal padding on both
    sides, computes the same number of outputs as the part has.
    """
    count, held = made[1] - made[0], own[1] - own[0]
    padding = _own_padding(window, own, made)
    if padding < 0 or held + 2 * padding < window.extent:
        return None
    if replace(window, padding=(padding, padding)).output_size(held) != count:
        return None
    low, high = _outputs_without_halo(window, size, own, made)
    return count - (high - low)


def _extents(
    w: Window, size: int, held: Interval, made: Interval, cut: bool
) -> tuple[SlabExtent, SlabExtent, SlabExtent, list[SlabExtent]]:
    """Return the extents of a part that `make_boundary` needs along one dimension.

    These are, in order, the extents of the part's inputs, of the same inputs in the buffer, of the
    entire buffer, and a list for the sides with halos. `cut` states whether the dimension is
    partitioned.
    """
    count, taps = made[1] - made[0], (0, w.kernel)
    padding, reach, inside = w.padding[0], size, (0, size)
    if cut:
        padding, reach = _own_padding(w, held, made), (count - 1) * w.stride + w.extent
        inside = padding, min(padding + held[1] - held[0], reach)
    own = SlabExtent(inside, inside, (0, count), taps, padding)
    every = SlabExtent((0, reach), (0, reach), (0, count), taps, 0 if cut else padding)
    return own, own, every, _halo_extents(w, size, held, made, inside) if cut else []


def _halo_extents(
    w: Window, size: int, held: Interval, made: Interval, own: Interval
) -> list[SlabExtent]:
    """Return the extents of the halos on both sides of a part's inputs.

    `held` and `made` are the global intervals of the part's inputs and outputs; `own` is the
    interval of its inputs in the buffer.
    """
    low, high = _outputs_without_halo(w, size, held, made)
    count = made[1] - made[0]
    sides = []
    if low:
        taps = min(-(-own[0] // w.dilation), w.kernel)
        stop = (low - 1) * w.stride + (taps - 1) * w.dilation + 1
        sides.append(SlabExtent((0, stop), (0, own[0]), (0, low), (0, taps)))
    if high < count:
        first = max(-(-(own[1] - (count - 1) * w.stride) // w.dilation), 0)
        start = high * w.stride + first * w.dilation
        reach = (count - 1) * w.stride + w.extent
        sides.append(SlabExtent((start, reach), (own[1], reach), (high, count), (first, w.kernel)))
    return sides


# The boundary of a block of outputs of a transposed convolution: the contributions of halos.
#
# In a transposed convolution every input contributes to several outputs. The contributions of own
# inputs and of halos are computed as far as the taps reach, and outputs outside of the own block
# are cropped.
#
# Index arithmetic only.


def _crop_arguments(
    m: TransposedWindow, inputs: Interval, outputs: Interval, taps: Interval | None = None
) -> tuple[int, int, Interval] | None:
    """Return padding, output padding and crop with which `inputs` result in exactly `outputs`.

    Only the kernel's `taps` are used, by default all. Returns None if `outputs` begin before the
    first output to which the inputs contribute, or end so far after the last one that output
    padding cannot fill the distance.
    """
    first, last = _written_outputs(m, inputs, taps or (0, m.kernel))
    before, after = outputs[0] - first, last - outputs[1]
    # The operator crops equally on both sides by itself, and can add outputs at the end.
    padding = min(before, after + max(m.stride, m.dilation) - 1)
    if padding < 0:
        return None
    extra = max(padding - after, 0)
    return padding, extra, (before - padding, after - padding + extra)


def _written_outputs(m: TransposedWindow, inputs: Interval, taps: Interval) -> Interval:
    """Return the interval of outputs to which `inputs` contribute through `taps` of the kernel."""
    start = inputs[0] * m.stride - m.padding + taps[0] * m.dilation
    stop = (inputs[1] - 1) * m.stride - m.padding + (taps[1] - 1) * m.dilation + 1
    return start, stop


def _transposed_halo_extents(
    m: TransposedWindow, size: int, own: Interval, made: Interval
) -> list[SlabExtent]:
    """Return the extents of the halos on both sides of a part's inputs, with global positions."""
    ((first, last),) = m.intervals(size, *made)
    sides = []
    for inputs in ((max(first, 0), own[0]), (own[1], min(last, size))):
        if inputs[0] >= inputs[1]:
            continue
        # The taps through which the last input reaches the own outputs or beyond, and through which
        # the first reaches them or earlier ones.
        low = -(((inputs[1] - 1) * m.stride - m.padding - made[0]) // m.dilation)
        high = (made[1] - 1 - inputs[0] * m.stride + m.padding) // m.dilation + 1
        taps = max(low, 0), min(high, m.kernel)
        if taps[0] >= taps[1]:
            continue
        start, stop = _written_outputs(m, inputs, taps)
        outputs = max(start, made[0]), min(stop, made[1])
        if outputs[0] < outputs[1]:
            sides.append(_extent(m, inputs, outputs, taps))
    return sides


def _extent(
    m: TransposedWindow, inputs: Interval, outputs: Interval, taps: Interval | None = None
) -> SlabExtent:
    arguments = _crop_arguments(m, inputs, outputs, taps)
    assert arguments is not None, "the first of the outputs is one that is written"
    return SlabExtent(inputs, inputs, outputs, taps or (0, m.kernel), *arguments)


def _transposed_outputs_with_halo(
    m: TransposedWindow, size: int, own: Interval, made: Interval
) -> int | None:
    """Return the number of a part's outputs to which halos contribute; None if it cannot overlap.

    An output that halos on both sides reach is counted twice. A part cannot overlap if it has no
    inputs or no outputs, or if no padding makes torch's operator compute the outputs `made` from
    the inputs `own`. Both are intervals of global positions; `size` is the dimension's number of
    inputs.
    """
    if own[0] == own[1] or made[0] == made[1] or _crop_arguments(m, own, made) is None:
        return None
    touched = (side.outputs for side in _transposed_halo_extents(m, size, own, made))
    return sum(b - a for a, b in touched)


def _transposed_extents(
    m: TransposedWindow, size: int, held: Interval, made: Interval, cut: bool
) -> tuple[SlabExtent, SlabExtent, SlabExtent, list[SlabExtent]]:
    first, last = m.intervals(size, *made)[0] if cut else (0, size)
    needed, origin = (max(held[0], first), min(held[1], last)), (first, made[0])
    own, every = (_shifted(_extent(m, i, made), *origin) for i in (needed, (first, last)))
    sides = _transposed_halo_extents(m, size, held, made) if cut else []
    return _extent(m, held, made), own, every, [_shifted(side, *origin) for side in sides]


def _shifted(side: SlabExtent, first_input: int, first_output: int) -> SlabExtent:
    """Subtract `first_input` from the inputs of `side`, and `first_output` from its outputs."""
    inputs = side.inputs[0] - first_input, side.inputs[1] - first_input
    outputs = side.outputs[0] - first_output, side.outputs[1] - first_output
    return replace(side, inputs=inputs, halo=inputs, outputs=outputs)
