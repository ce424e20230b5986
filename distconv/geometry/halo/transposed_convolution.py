"""The boundary of a block of outputs of a transposed convolution: the contributions of halos.

The mirror image of `convolution_boundary`: every input is spread over some outputs. Own inputs and
halos alike are spread as far as the taps reach, and outputs outside the own block are cropped.

Index arithmetic only.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from distconv.geometry.halo.slabs import (
    Boundary,
    SlabExtent,
    halo_slabs,
    local_input,
    plan_with_dimensions,
)
from distconv.geometry.index_maps import Interval, TransposedWindow
from distconv.geometry.layout import Cuts, block, distinct_parts
from distconv.geometry.topology import Topology


@lru_cache(maxsize=4096)
def transposed_needs_halo(
    maps: tuple[TransposedWindow, ...], sizes: tuple[int, ...], parts: tuple[int, ...]
) -> bool | None:
    """Return whether any part's inputs reach outputs of other parts; None if parts cannot overlap.

    Parts can overlap if the results of their own inputs contain their outputs, and if at least half
    of these need no halo.

    Parameters
    ----------
    sizes, parts: for each spatial dimension, the number of inputs, and of parts that cut it.
    """
    found = False
    for m, size, n in zip(maps, sizes, parts, strict=True):
        outputs = m.output_size(size)
        for j in distinct_parts(size, outputs, n, m.steps):
            own, made = block(size, n, j), block(outputs, n, j)
            if own[0] == own[1] or made[0] == made[1] or _crop_arguments(m, own, made) is None:
                return None
            if n > 1:
                touched = [s.outputs for s in _halo_extents(m, size, own, made)]
                if 2 * sum(b - a for a, b in touched) > made[1] - made[0]:
                    return None
                found |= bool(touched)
    return found


def _crop_arguments(
    m: TransposedWindow, inputs: Interval, outputs: Interval, taps: Interval | None = None
) -> tuple[int, int, Interval] | None:
    """Return padding, output padding and crop with which these inputs give exactly these outputs.

    Returns None if the first output lies before all outputs that the inputs reach.
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
    """Return the halo slabs before and after a rank's inputs, with positions in the plane.

    `own` are its inputs of `size`, `made` its outputs, along one dimension.
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


@lru_cache(maxsize=4096)
def transposed_convolution_boundary(
    topology: Topology,
    rank: int,
    shape: tuple[int, ...],
    made: tuple[int, ...],
    cuts: Cuts,
    maps: tuple[TransposedWindow, ...],
) -> Boundary:
    """Return the boundary of one rank's block; `transposed_needs_halo` must not be None.

    Parameters
    ----------
    shape, made: the global shapes of input and output, both cut by `cuts`.
    maps: one for each spatial dimension.
    """
    plan, rows = plan_with_dimensions(topology, rank, shape, made, cuts, maps)
    whole, own, every, sides = [], [], [], []
    for m, n, held, outputs, c in rows:
        first, last = m.intervals(n, *outputs)[0] if c else (0, n)
        needed = max(held[0], first), min(held[1], last)
        origin = first, outputs[0]
        whole.append(_extent(m, held, outputs))
        own.append(_shifted(_extent(m, needed, outputs), *origin))
        every.append(_shifted(_extent(m, (first, last), outputs), *origin))
        sides.append(
            [_shifted(s, *origin) for s in (_halo_extents(m, n, held, outputs) if c else ())]
        )
    block_itself = local_input(plan, whole)
    return Boundary(
        plan,
        replace(block_itself, shape=plan.block_shape, crop=None),
        local_input(plan, every),
        halo_slabs(plan, own, every, sides),
        block_itself.crop,
    )


def _shifted(side: SlabExtent, first: int, made: int) -> SlabExtent:
    """Return the extent with inputs counted from `first` and outputs from `made`."""
    inputs = side.inputs[0] - first, side.inputs[1] - first
    outputs = side.outputs[0] - made, side.outputs[1] - made
    return replace(side, inputs=inputs, halo=inputs, outputs=outputs)
