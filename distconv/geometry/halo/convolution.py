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
from functools import partial

from distconv.geometry.halo.slabs import SlabExtent, any_halo, make_boundary
from distconv.geometry.index_maps import Interval
from distconv.geometry.windows import Window


def _own_padding(window: Window, own: Interval, made: Interval) -> int:
    """Return the number of positions by which a part's first window begins before its inputs.

    `own` is the interval of the part's inputs, `made` that of its outputs.
    """
    return window.padding[0] + own[0] - made[0] * window.stride


def _outputs_without_halo(window: Window, size: int, own: Interval, made: Interval) -> Interval:
    """Return the interval of a part's outputs that need no halo, relative to its first output.

    Along one dimension with `size` inputs, `own` is the interval of the part's inputs, `made` that
    of its outputs.
    """
    count = made[1] - made[0]
    padding = _own_padding(window, own, made)
    low = min(-(-padding // window.stride), count) if own[0] > 0 else 0
    if own[1] == size:
        return low, count
    high = (padding + own[1] - own[0] - window.extent) // window.stride + 1
    return low, min(max(low, high), count)


def _outputs_with_halo(window: Window, size: int, own: Interval, made: Interval) -> int | None:
    """Return the number of a part's outputs that need halos; None if the part cannot overlap.

    It can if the operator, applied to the part's inputs with equal padding on both sides, has as
    many results as the part has outputs.
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
    """Return a `SlabExtent` for the halo on each side of a rank's inputs along one dimension.

    `held` and `made` are the global intervals of the rank's inputs and outputs; `own` is the
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


needs_halo = partial(any_halo, _outputs_with_halo)
"""A function (windows, sizes, parts): `any_halo` of a convolution."""
convolution_boundary = partial(make_boundary, _extents)
"""A function (topology, rank, shape, made, cuts, windows): `make_boundary` of a convolution."""
