"""The boundary of a block of outputs of a transposed convolution: the contributions of halos.

The mirror image of `convolution_boundary`: every input is spread over some outputs. Own inputs and
halos alike are spread as far as the taps reach, and outputs outside the own block are cropped.

Index arithmetic only.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from distconv.geometry.halo.slabs import SlabExtent, any_halo, make_boundary
from distconv.geometry.index_maps import Interval
from distconv.geometry.windows import TransposedWindow


def _crop_arguments(
    m: TransposedWindow, inputs: Interval, outputs: Interval, taps: Interval | None = None
) -> tuple[int, int, Interval] | None:
    """Return padding, output padding and crop with which `inputs` give exactly `outputs`.

    Only the kernel's `taps` are used, by default all. Returns None if `outputs` begin before the
    first output that the inputs reach, or end farther behind the last than output padding can fill.
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
    """Return the outputs, from first to last, that these inputs reach through these taps."""
    start = inputs[0] * m.stride - m.padding + taps[0] * m.dilation
    stop = (inputs[1] - 1) * m.stride - m.padding + (taps[1] - 1) * m.dilation + 1
    return start, stop


def _halo_extents(
    m: TransposedWindow, size: int, own: Interval, made: Interval
) -> list[SlabExtent]:
    """Return a `SlabExtent` for the halo on each side of a rank's inputs, with global positions.

    Along one dimension with `size` inputs, `own` is the interval of the rank's inputs, `made` that
    of its outputs.
    """
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


def _outputs_with_halo(m: TransposedWindow, size: int, own: Interval, made: Interval) -> int | None:
    """Return the number of a part's outputs to which halos contribute; None if it cannot overlap.

    A part is one rank's share of a dimension of `size` inputs: `own` is the interval of its inputs,
    `made` that of its outputs. It cannot overlap if one of them is empty, or `_crop_arguments`
    returns None.
    """
    if own[0] == own[1] or made[0] == made[1] or _crop_arguments(m, own, made) is None:
        return None
    touched = (side.outputs for side in _halo_extents(m, size, own, made))
    return sum(b - a for a, b in touched)


def _extents(
    m: TransposedWindow, size: int, held: Interval, made: Interval, cut: bool
) -> tuple[SlabExtent, SlabExtent, SlabExtent, list[SlabExtent]]:
    first, last = m.intervals(size, *made)[0] if cut else (0, size)
    needed, origin = (max(held[0], first), min(held[1], last)), (first, made[0])
    own, every = (_shifted(_extent(m, i, made), *origin) for i in (needed, (first, last)))
    sides = _halo_extents(m, size, held, made) if cut else []
    return _extent(m, held, made), own, every, [_shifted(side, *origin) for side in sides]


def _shifted(side: SlabExtent, first_input: int, first_output: int) -> SlabExtent:
    """Subtract `first_input` from the inputs of `side`, and `first_output` from its outputs."""
    inputs = side.inputs[0] - first_input, side.inputs[1] - first_input
    outputs = side.outputs[0] - first_output, side.outputs[1] - first_output
    return replace(side, inputs=inputs, halo=inputs, outputs=outputs)


transposed_needs_halo = partial(any_halo, _outputs_with_halo)
"""A function (maps, sizes, parts): `any_halo` of a transposed convolution."""
transposed_convolution_boundary = partial(make_boundary, _extents)
"""A function (topology, rank, shape, made, cuts, maps): `make_boundary` of the operator."""
