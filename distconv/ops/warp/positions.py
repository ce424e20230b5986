"""Arithmetic of `grid_sample`: pixels from coordinates, and coordinates in a box of the plane.

Torch's kernels take coordinates from -1 to 1 across the plane that they are given. To sample a box
of the plane, coordinates are converted to pixels exactly as the kernel does, then into the image as
the padding mode says, and then to coordinates across the box. Rounding of a coordinate in the box
differs. Where it would round down to another integer pixel than in the plane, the coordinate is
shifted by a few units in the last place, because the slope of linear interpolation jumps at
integers. Half types are too short for coordinates across a box, so these coordinates are in
float32.

No communication.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, floor, inf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from distconv.geometry.index_maps import Interval
from distconv.ops.support.operands import HALVES, accumulation_type, to_accumulation_type
from distconv.torch_private import ShardFunction

CHUNK = 2**15
"""The number of points computed at a time on CPUs, so that intermediate results stay in cache."""

WILD = 2.0**20
"""The pixel number from which on pixels are not reflected or clipped: torch's kernels disagree
about such pixels, and about nan."""

FEWEST = 3
"""The least width of a box, unless the plane is narrower."""


class Sampling(NamedTuple):
    """The arguments of `grid_sample`, and the rounding of torch's kernel.

    Attributes
    ----------
    mode, padding, corners: torch's mode, padding_mode and align_corners.
    fused: whether the kernel multiplies and adds with one rounding. All kernels do so except the
        one of CPUs for volumes.
    accelerated: whether the kernel runs on an accelerator.
    """

    mode: str
    padding: str
    corners: bool
    fused: bool
    accelerated: bool

    @property
    def padding_in_box(self) -> str:
        """Return the padding mode with which to sample a box.

        In the bicubic mode, pixels may remain outside the image by the reach of the taps, and the
        padding mode still applies. Otherwise pixels are already in the image, or the padding is
        zeros.
        """
        return self.padding if self.mode == "bicubic" else "zeros"

    def pixels(self, x: Tensor, size: int) -> Tensor:
        """Return the fractional pixel positions of the coordinates `x` across `size` pixels.

        The positions equal those of torch's kernel to the last bit.
        """
        if x.dtype in HALVES:
            if not self.accelerated:  # whose kernels compute in float32
                y = (x + 1).mul_(x.new_tensor(self.slope(size)))
                return y if self.corners else y.sub_(0.5)
            x = x.float()
        y = x + 1
        if self.corners:
            return y.mul_((size - 1) / 2)
        if self.fused:
            return torch.add(y.new_full((), -0.5), y, alpha=size / 2, out=y)
        return y.mul_(size).sub_(1).mul_(0.5)

    def slope(self, size: int) -> float:
        """Return the derivative of a pixel position by its coordinate, across `size` pixels."""
        return (size - 1) / 2 if self.corners else size / 2

    def edges(self, size: int) -> tuple[float, float]:
        """Return the pixel positions at which a plane of `size` pixels is reflected."""
        return (0.0, size - 1.0) if self.corners else (-0.5, size - 0.5)

    def inside(self, pixels: Tensor, size: int) -> Tensor:
        """Return `pixels`, positions, reflected or clipped to `size` pixels by the padding mode."""
        if self.padding == "border":
            reach = 3 if self.mode == "bicubic" else 0
            return pixels.clamp_(-reach, size - 1 + reach)
        if self.padding == "reflection":
            low, high = self.edges(size)
            span = high - low
            far = pixels.sub_(low).abs_().fmod_(2 * span) if span else pixels.zero_()
            pixels = torch.minimum(far, 2 * span - far).add_(low)
            if self.mode != "bicubic":
                pixels.clamp_(0, size - 1)
        return pixels

    def signs(self, pixels: Tensor, size: int) -> Tensor | None:
        """Return the derivative of the reflected or clipped positions by the positions `pixels`.

        The derivative is -1, 0 or 1; None means 1 everywhere. In the nearest mode, and where the
        bicubic mode clips, the kernel's gradient is 0 anyway.
        """
        clipped = (self.padding, self.mode) == ("border", "bicubic")
        if self.padding == "zeros" or self.mode == "nearest" or clipped:
            return None
        if self.padding == "border":
            return ((pixels > 0) & (pixels < size - 1)).to(pixels.dtype)
        low, high = self.edges(size)
        far = pixels - low
        turned = far < 0
        turned ^= far.abs_().fmod_(2 * (high - low)) > high - low
        signs = 1 - 2 * turned.to(pixels.dtype)
        if self.mode != "bicubic":
            at = self.inside(pixels, size)
            signs *= (at > 0) & (at < size - 1)
        return signs

    def in_box(self, x: Tensor, size: int, box: Interval) -> Tensor:
        """Return coordinates across the interval `box` for coordinates `x` across `size` pixels."""
        rounded = x.dtype in HALVES and not self.accelerated
        if box == (0, size) and self.padding == self.padding_in_box and not rounded:
            return x
        start, width = box[0], box[1] - box[0]
        pixels = to_accumulation_type(self.inside(self.pixels(x, size), size))
        if self.mode == "nearest":
            pixels.round_()  # halves to even pixels of the plane; in the box they may be odd
        pixels.sub_(start)
        first = -1.0 if self.corners else 1 / width - 1
        unit = 1 / (self.slope(width) or 1.0)
        moved = torch.add(pixels.new_full((), first), pixels, alpha=unit)
        if self.mode == "bilinear":
            jump = pixels.floor_().sub_(self.pixels(moved, width).floor_())
            moved.add_(jump, alpha=4 * torch.finfo(moved.dtype).eps)
        return moved

    def interval(self, low: float, high: float, size: int) -> Interval:
        """Return the interval, out of `size` pixels, that is read to sample from `low` to `high`.

        The interval has `FEWEST` pixels or more, or all pixels of a narrower plane. With reflection
        or clipping, nan and positions beyond `WILD` need all pixels.
        """
        if not low <= high:
            return 0, min(FEWEST, size)
        if self.padding != "zeros" and max(-low, high) >= WILD:
            return 0, size
        margin = 2 if self.mode == "bicubic" else 0
        if self.padding == "reflection":
            first, last = self.edges(size)
            if low < first or high > last:
                low, high = _reflected(low, high, first, last)
                margin += 1  # rounding of the kernel may differ
        start = max(min(floor(max(low, -1)) - margin, size - FEWEST), 0)
        stop = min(max(floor(min(high, size)) + 2 + margin, start + FEWEST), size)
        return start, stop


def _reflected(low: float, high: float, first: float, last: float) -> tuple[float, float]:
    """Return the extremes of the interval [low, high] after reflections at `first` and `last`."""
    span = last - first
    if not span:
        return first, first
    turns = [
        first + k * span
        for k in range(ceil((low - first) / span), floor((high - first) / span) + 1)
    ]
    if len(turns) > 1:
        return first, last
    ends = [abs(p - first) % (2 * span) for p in (low, high, *turns)]
    ends = [min(p, 2 * span - p) + first for p in ends]
    return min(ends), max(ends)


def extremes(sampling: Sampling, points: Tensor, plane: tuple[int, ...]) -> list[Interval]:
    """Return, for each dimension of `plane`, the interval of pixels read to sample at `points`.

    `points` are (..., coordinates), with the coordinate along the last dimension of the plane
    first. Without points the intervals are empty.
    """
    if not points.numel():
        return [(0, 0)] * len(plane)
    bounds = torch.stack([torch.stack(x.aminmax()) for x in points.unbind(-1)][::-1])
    found = _pixels_of(sampling, bounds, plane)
    if not all(abs(p) < inf for pair in found for p in pair):
        if sampling.padding != "zeros":
            return [(0, n) for n in plane]
        # Positions that are not finite lie outside of any plane.
        finite = points.isfinite()
        low, high = points.where(finite, inf), points.where(finite, -inf)
        ends = [
            torch.stack([a.amin(), b.amax()])
            for a, b in zip(low.unbind(-1), high.unbind(-1), strict=True)
        ]
        found = _pixels_of(sampling, torch.stack(ends[::-1]), plane)
    return [sampling.interval(low, high, n) for (low, high), n in zip(found, plane, strict=True)]


def _pixels_of(sampling: Sampling, bounds: Tensor, plane: tuple[int, ...]) -> list[list[float]]:
    """Return the pixel positions of coordinates, `bounds`, a row for each dimension of `plane`."""
    rows = [sampling.pixels(row, n) for row, n in zip(bounds.unbind(0), plane, strict=True)]
    return torch.stack(rows).tolist()


class Relocate(ShardFunction):
    """The conversion of points from coordinates across the plane to coordinates across a box.

    `boxes` has the box's interval for each dimension of `plane`. Differentiable once.
    """

    @staticmethod
    def forward(
        ctx: Any, points: Tensor, sampling: Sampling, plane: tuple[int, ...], boxes: list[Interval]
    ) -> Tensor:
        ctx.save_for_backward(points)
        ctx.relocation = sampling, plane, boxes
        dtype = accumulation_type(points.dtype)
        moved = torch.empty(points.shape, dtype=dtype, device=points.device)
        for size, box, source, target in _chunks(sampling, plane, boxes, points, moved):
            target.copy_(sampling.in_box(source, size, box))
        return moved

    @staticmethod
    @once_differentiable  # as torch's kernels are
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (points,) = ctx.saved_tensors
        sampling, plane, boxes = ctx.relocation
        result = torch.empty(points.shape, dtype=points.dtype, device=points.device)
        tensors = points, grads[0], result
        for size, box, source, grad, target in _chunks(sampling, plane, boxes, *tensors):
            across = sampling.slope(box[1] - box[0]) or 1.0
            torch.mul(grad, sampling.slope(size) / across, out=target)
            signs = sampling.signs(sampling.pixels(source, size), size)
            if signs is not None:
                target *= signs
        return result, None, None, None


def _chunks(
    sampling: Sampling, plane: tuple[int, ...], boxes: list[Interval], *tensors: Tensor
) -> Iterator[Any]:
    """Yield columns of coordinates of each tensor, with the size and box of their dimension.

    Every tensor is (..., coordinates). On CPUs a column has `CHUNK` points, on accelerators all
    points.
    """
    flat = [x.reshape(-1, len(plane)) for x in tensors]
    step = max(len(flat[0]), 1) if sampling.accelerated else CHUNK
    for first in range(0, len(flat[0]), step):
        for d, (size, box) in enumerate(zip(plane, boxes, strict=True)):
            column = len(plane) - 1 - d
            yield size, box, *(x[first : first + step, column] for x in flat)
