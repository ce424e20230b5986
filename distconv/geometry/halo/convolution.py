"""The boundary of a block of outputs, where windows reach beyond the rank's own inputs into halos.

The result of a linear windowed operator is the sum of two: one for a rank's own inputs, with zeros
around them, and one for its halos. The halos lie in slabs along the sides of the own block, and
contribute to a few outputs, through a few taps of the kernel. A corner belongs to the first of its
dimensions, so that no element is counted twice.

The inputs in the halos, and the ranks they come from, are given by the plan
(`geometry.index_maps`, `geometry.plan`). Index arithmetic only. Positions of inputs are counted in
the plan's buffer, which begins where the first window does, in the padding if need be.
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
from distconv.geometry.index_maps import Interval, Window
from distconv.geometry.layout import Cuts, block, distinct_parts
from distconv.geometry.topology import Topology


@lru_cache(maxsize=4096)
def needs_halo(
    windows: tuple[Window, ...], sizes: tuple[int, ...], parts: tuple[int, ...]
) -> bool | None:
    """Return whether any part's windows reach into halos; None if parts cannot overlap.

    Parts can overlap if each computes exactly its outputs from its own inputs, with equal padding
    on both sides, and if at least half of these outputs need no halo.

    Parameters
    ----------
    sizes, parts: for each spatial dimension, the number of inputs, and of parts that cut it.
    """
    found = False
    for window, size, n in zip(windows, sizes, parts, strict=True):
        outputs = window.output_size(size)
        if n == 1:
            if window.padding[0] != window.padding[1]:
                return None
            continue
        for j in distinct_parts(size, outputs, n, window.steps):
            own, made = block(size, n, j), block(outputs, n, j)
            count, held = made[1] - made[0], own[1] - own[0]
            padding = own_padding(window, own, made)
            if padding < 0 or held + 2 * padding < window.extent:
                return None
            own_window = replace(window, padding=(padding, padding))
            if own_window.output_size(held) != count:
                return None
            low, high = outputs_without_halo(window, size, own, made)
            if 2 * (high - low) < count:
                return None
            found |= high - low < count
    return found


def own_padding(window: Window, own: Interval, made: Interval) -> int:
    """Return the number of positions by which a part's first window begins before its inputs.

    `own` are the part's inputs, `made` its outputs.
    """
    return window.padding[0] + own[0] - made[0] * window.stride


def outputs_without_halo(window: Window, size: int, own: Interval, made: Interval) -> Interval:
    """Return a part's outputs that need no halo, counted from its first output.

    `own` are the part's inputs of `size`, `made` its outputs.
    """
    count = made[1] - made[0]
    padding = own_padding(window, own, made)
    low = min(-(-padding // window.stride), count) if own[0] > 0 else 0
    if own[1] == size:
        return low, count
    high = (padding + own[1] - own[0] - window.extent) // window.stride + 1
    return low, min(max(low, high), count)


@lru_cache(maxsize=4096)
def convolution_boundary(
    topology: Topology,
    rank: int,
    shape: tuple[int, ...],
    made: tuple[int, ...],
    cuts: Cuts,
    windows: tuple[Window, ...],
) -> Boundary:
    """Return the boundary of one rank's block; `needs_halo` must not be None.

    Parameters
    ----------
    shape, made: the global shapes of input and output, both cut by `cuts`.
    windows: one for each spatial dimension.
    """
    plan, rows = plan_with_dimensions(topology, rank, shape, made, cuts, windows)
    own, every, sides = [], [], []
    for w, n, held, outputs, c in rows:
        count, taps = outputs[1] - outputs[0], (0, w.kernel)
        if c:
            padding = own_padding(w, held, outputs)
            reach = (count - 1) * w.stride + w.extent
            inside = padding, min(padding + held[1] - held[0], reach)
        else:
            padding, reach, inside = w.padding[0], n, (0, n)
        own.append(SlabExtent(inside, inside, (0, count), taps, padding))
        every.append(SlabExtent((0, reach), (0, reach), (0, count), taps, 0 if c else padding))
        sides.append(_halo_extents(w, n, held, outputs, inside) if c else [])
    return Boundary(
        plan,
        replace(local_input(plan, own), shape=plan.block_shape),
        local_input(plan, every),
        halo_slabs(plan, own, every, sides),
    )


def _halo_extents(
    w: Window, size: int, held: Interval, made: Interval, own: Interval
) -> list[SlabExtent]:
    """Return the halo slabs before and after a rank's inputs along one dimension.

    `held` are its inputs and `made` its outputs; `own` are its inputs, counted in the buffer.
    """
    low, high = outputs_without_halo(w, size, held, made)
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
