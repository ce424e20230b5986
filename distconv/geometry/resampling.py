"""Geometry of resampling: positions and weights of each output's inputs along one dimension.

Index arithmetic only. Positions and weights follow torch's conventions, and are computed in torch's
precision, so that both round in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from distconv.geometry.index_maps import Ascending, Interval, cached

_CUBIC = -0.75
_CUBIC_ANTIALIAS = -0.5
_LONGEST_PERIOD = 32
"""The largest denominator of `Resampled.ratio`; a buffer begins early by fewer inputs than this."""


@dataclass(frozen=True)
class Resampled(Ascending):
    """The index map of resampling a dimension to `outputs` positions.

    Parameters
    ----------
    scale: the number of outputs per input if the caller gave one; None for the ratio of the sizes.
    mode: "nearest", "nearest-exact", "linear" or "cubic".
    precision: the numpy type in which positions are computed.
    accelerator: whether an accelerator computes; its kernels find nearest inputs by other formulas.
    planar: whether the tensor has two spatial dimensions, which matters on accelerators only.
    """

    outputs: int
    scale: float | None
    mode: str
    align_corners: bool = False
    antialias: bool = False
    precision: str = "float64"
    accelerator: bool = False
    planar: bool = True

    def output_size(self, size: int) -> int:
        return self.outputs

    @cached
    def intervals(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        positions, _ = self.taps(size, start, stop)
        first, ratio = int(positions.min()), self.ratio(size)
        # If the buffer begins at an input whose edge is an edge of an output, positions in the
        # buffer are those in the global dimension.
        return ((first - (first % ratio.denominator if ratio else 0), int(positions.max()) + 1),)

    def ratio(self, size: int) -> Fraction | None:
        """Return the number of outputs per input as a fraction with a small denominator.

        Returns None if there is no such fraction, with `align_corners`, and for a scale other than
        1 between equal sizes.
        """
        if self.align_corners:
            return None
        scale = self.scale if self.scale is not None and self.scale > 0 else self.outputs / size
        near = Fraction(scale).limit_denominator(_LONGEST_PERIOD)
        return near if float(near) == scale and (near == 1 or self.outputs != size) else None

    @cached
    def alone(self, size: int, start: int, stop: int) -> tuple[int, float] | None:
        """Return torch's arguments to compute the outputs [start, stop) from their inputs alone.

        The inputs are those of `intervals`. The first argument is the number of surplus outputs
        that torch returns before `start`, the second the number of outputs per input. Returns None
        if torch's kernel would use other positions than for the global dimension.
        """
        ratio = self.ratio(size)
        if ratio is None:
            return None
        ((first, last),) = self.intervals(size, start, stop)
        before, scale, window = start - int(first * ratio), float(ratio), last - first
        local = replace(self, outputs=before + stop - start, scale=scale)
        if local.outputs == window and ratio != 1:
            return None  # torch does not resample equal sizes, whatever the scale
        if self.mode.startswith("nearest"):  # where rounding decides
            found = _nearest(local, window, np.arange(before, local.outputs)) + first
            wanted = _nearest(self, size, np.arange(start, stop))
            if before < 0 or local.ambiguous(window) or (found != wanted).any():
                return None
        return before, scale

    @cached
    def taps(self, size: int, start: int, stop: int) -> tuple[NDArray, NDArray]:
        """Return the positions and weights of the inputs of the outputs [start, stop).

        Both arrays have the shape (stop - start, number of inputs of an output).
        """
        outputs = np.arange(start, stop)
        if self.mode.startswith("nearest"):
            return _nearest(self, size, outputs)[:, None], np.ones((len(outputs), 1))
        if self.antialias:
            return _antialiased(self, size, outputs)
        if self.mode == "linear" and self.outputs == size:
            # torch reads the same input twice, which shows where that is infinite.
            return np.stack([outputs, outputs], 1), np.tile([1.0, 0.0], (len(outputs), 1))
        real = np.dtype(self.precision).type
        step, half = self.step(size), real(0.5)
        source = step * outputs.astype(real)
        if not self.align_corners:
            source = step * (outputs.astype(real) + half) - half
            if self.mode == "linear":
                source = np.maximum(source, real(0))
        below = np.minimum(np.floor(source).astype(np.int64), size - 1)
        t = np.clip(source - below.astype(real), real(0), real(1))
        if self.mode == "linear":
            positions = np.stack([below, np.minimum(below + 1, size - 1)], 1)
            return positions, np.stack([1 - t, t], 1)
        positions = np.clip(below[:, None] + np.arange(-1, 3), 0, size - 1)
        distances = (t + 1, t, 1 - t, 2 - t)
        return positions, np.stack([_cubic(d, _CUBIC) for d in distances], 1)

    def step(self, size: int) -> np.floating:
        """Return the number of inputs per output, in a dimension of `size` inputs."""
        real = np.dtype(self.precision).type
        if self.align_corners:
            return real(size - 1) / real(self.outputs - 1) if self.outputs > 1 else real(0)
        if self.scale is not None and self.scale > 0:
            return real(1.0 / self.scale)
        return real(size) / real(self.outputs)

    @cached
    def ambiguous(self, size: int) -> bool:
        """Return whether torch's kernels choose different nearest inputs for some output.

        On CPUs some kernels ignore the scale if the ratio of the sizes is 1 or 2, and some kernels
        compute in the precision of the data. Forward and backward pass may use different kernels,
        and so may memory formats. In two dimensions all kernels agree. On accelerators the backward
        pass uses a different formula.
        """
        if not self.mode.startswith("nearest"):
            return False
        outputs = np.arange(self.outputs)
        kernels = [_nearest(self, size, outputs)]
        if self.accelerator:
            return bool((_nearest_in_backward(self, size, outputs) != kernels[0]).any())
        reals = np.float32, np.dtype(self.precision).type
        kernels += [_scaled(self, size, outputs, real) for real in reals]
        return any((kernel != kernels[0]).any() for kernel in kernels)


def _nearest(r: Resampled, size: int, outputs: NDArray) -> NDArray:
    """Return the nearest input of each of `outputs`; as in torch, computed in float32."""
    if r.accelerator:
        if r.planar and r.outputs == size:
            return outputs
    elif r.mode == "nearest" and r.outputs in (size, 2 * size):
        return outputs // (r.outputs // size)
    return _scaled(r, size, outputs, np.float32)


def _nearest_in_backward(r: Resampled, size: int, outputs: NDArray) -> NDArray:
    """Return, for each of `outputs`, the input that gets its gradient on accelerators in torch.

    Input i gets the gradients of all outputs o with i * scale <= o < (i + 1) * scale; for
    "nearest-exact" both bounds are smaller by 0.5.
    """
    real = np.float32
    scale = real(r.scale) if r.scale and r.scale > 0 else real(r.outputs) / real(size)
    offset = real(0.5) if r.mode == "nearest-exact" else real(0)
    begins = np.ceil(np.arange(size, dtype=real) * scale - offset)
    return np.searchsorted(begins, outputs, side="right") - 1


def _scaled(r: Resampled, size: int, outputs: NDArray, real: type[np.floating]) -> NDArray:
    step = real(1.0 / r.scale) if r.scale and r.scale > 0 else real(size) / real(r.outputs)
    offset = real(0.5) if r.mode == "nearest-exact" else real(0)
    source = np.floor(((outputs.astype(real) + offset) * step).astype(np.float32))
    return np.minimum(source.astype(np.int64), size - 1)


def _antialiased(r: Resampled, size: int, outputs: NDArray) -> tuple[NDArray, NDArray]:
    """Return positions and weights of the inputs of `outputs`, by an antialiasing filter.

    As in Pillow, the width of the filter is proportional to the number of inputs per output.
    """
    real = np.dtype(r.precision).type
    step = r.step(size)
    half_width = real(1 if r.mode == "linear" else 2)
    support = half_width * max(step, real(1))
    inverse = real(1) / step if step >= 1 else real(1)
    center = step * (outputs.astype(real) + real(0.5))
    first = np.maximum((center - support + real(0.5)).astype(np.int64), 0)
    last = np.minimum((center + support + real(0.5)).astype(np.int64), size)
    width = max(int((last - first).max()), 1)
    positions = first[:, None] + np.arange(width)
    distance = np.abs((positions - center[:, None] + real(0.5)) * inverse)
    if r.mode == "linear":
        weights = np.maximum(1 - distance, 0)
    else:
        weights = _cubic(distance, _CUBIC_ANTIALIAS)
    weights = np.where(positions < last[:, None], weights, 0)
    weights = weights / weights.sum(1, keepdims=True)
    # Shorter filters repeat their last input, so that no output needs more than torch reads.
    return np.minimum(positions, last[:, None] - 1), weights


def _cubic(distance: NDArray, a: float) -> NDArray:
    """Return the cubic convolution kernel (Keys 1981) with parameter `a` at each distance."""
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0))
