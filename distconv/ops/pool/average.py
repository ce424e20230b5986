"""Average and power-average pooling of partitioned planes and volumes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.comm.packing import empty_in_format, has_channels_last
from distconv.device.kinds import is_accelerator
from distconv.geometry.index_maps import Window
from distconv.ops.support.arguments import (
    Sizes,
    accepts_unbatched,
    any_type,
    check_on_meta,
    to_tuple,
)
from distconv.ops.support.dimensions import works_on_samples
from distconv.ops.support.operands import Placement, constant
from distconv.ops.support.windows import (
    PlannedWindows,
    gather_windows,
    make_windows,
    plan_windows,
    window_arguments,
    with_some_channel,
)
from distconv.tensor.base import whole_number
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor

# A check of types, and an input for backward passes that do not read their input.


def check_pooled_type(name: str, input: DistTensor, implemented: bool) -> None:
    """Raise NotImplementedError on every rank unless `implemented`.

    `implemented` is whether torch can pool tensors of the type of `input`. `name` is the name of
    the pooling function, for the error.
    """
    if not implemented:
        raise NotImplementedError(
            f"{name}: not implemented for {input.dtype}; convert it, x.float()"
        )


def unread_input(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return a tensor of shape `shape` to pass as the input to torch's backward pass of pooling.

    torch reads only the shape and the memory format of this input, not its elements. The memory
    format is that of `like`. On GPUs torch would copy an input that is not contiguous, so the
    result has memory of its own there.
    """
    if is_accelerator(like.device) or has_channels_last(like):
        return empty_in_format(shape, like)
    return like.new_empty(()).expand(shape)


_AVERAGED = (torch.float64, torch.float32, torch.int64)
_HALF = (torch.float16, torch.bfloat16)
"""The half-precision types that are supported in one and two dimensions, not in three."""


def _avg_pool(local: Callable[..., Tensor], n: int) -> None:
    name = f"avg_pool{n}d"

    @implements(local)
    @works_on_samples(local, n)
    @accepts_unbatched(name, n)
    def rule(
        input: DistTensor,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> DistTensor:
        check_pooled_type(name, input, input.dtype in (*_AVERAGED, *(_HALF if n < 3 else ())))
        windows = make_windows(kernel_size, stride, padding, 1, ceil_mode, n)
        kernels, strides, paddings, _ = window_arguments(windows)
        # avg_pool1d has no argument `divisor_override`.
        if divisor_override is not None:
            divisor_override = whole_number(divisor_override, "divisor_override")
        override = () if n == 1 else (divisor_override,)
        arguments = (kernels, strides, paddings, ceil_mode, count_include_pad, *override)
        check_on_meta(local, any_type(input), *arguments)
        plan = plan_windows(Placement.of(input), windows)
        if not any(input.cuts[2:]):
            shard = local(with_some_channel(input.shard), *arguments).reshape(plan.block)
            return DistTensor(shard, plan.shape, input.cuts, input.grid)
        divisor = divisor_override or _divisor(input, plan, count_include_pad)
        # The divisor that the local pooling applies: as large as possible, so that sums of small
        # types do not overflow.
        first = divisor if isinstance(divisor, int) else prod(kernels)
        if not input.is_floating_point():
            first = 1

        buffer = with_some_channel(gather_windows(input, plan, name))
        shard = plan.outputs(_average(buffer, kernels, strides, plan.left, ceil_mode, first))
        if not shard.is_floating_point():
            shard = torch.div(shard, divisor, rounding_mode="trunc")
        elif isinstance(divisor, Tensor):
            shard = shard.mul_((first / divisor.double()).to(shard.dtype))
        return DistTensor(shard, plan.shape, input.cuts, input.grid)


@lru_cache(maxsize=4096)
def _counts(window: Window, size: int, start: int, stop: int, include_pad: bool) -> tuple[int, ...]:
    """Return the number of elements of the windows [start, stop) along a dimension.

    `size` is the global size of the dimension. Padding counts if `include_pad`.
    """
    counts = []
    for o in range(start, stop):
        first = o * window.stride - window.padding[0]
        last = min(first + window.kernel, size + window.padding[1])
        counts.append(last - first if include_pad else min(last, size) - max(first, 0))
    return tuple(counts)


@lru_cache(maxsize=4096)
def _uniform(windows: tuple[Window, ...], sizes: tuple[int, ...], include_pad: bool) -> int | None:
    """Return the divisor that all averages of the global plane share; None if divisors differ.

    `sizes` are the global spatial sizes. Padding counts if `include_pad`.
    """
    every = [
        _counts(w, n, 0, w.output_size(n), include_pad) for w, n in zip(windows, sizes, strict=True)
    ]
    return prod(c[0] for c in every) if all(min(c) == max(c) for c in every) else None


def _divisor(x: DistTensor, plan: PlannedWindows, include_pad: bool) -> Tensor | int:
    """Return the divisors of this rank's averages, of the spatial shape of its output block.

    If all averages of the global plane have the same divisor, return the number.
    """
    windows, box = plan.windows, plan.box
    uniform = _uniform(windows, tuple(x.shape[2:]), include_pad)
    if uniform is not None:
        return uniform
    divisor = torch.ones((), dtype=torch.int64, device=x.shard.device)
    for row in zip(windows, x.shape[2:], box.start[2:], box.stop[2:], strict=True):
        divisor = divisor.unsqueeze(-1) * constant(divisor.device, _counts(*row, include_pad))
    return divisor


def _average(
    x: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    ceil_mode: bool,
    divisor: int,
) -> Tensor:
    """Return the sums of `x` over windows of its last dimensions, each divided by `divisor`.

    `kernel`, `stride` and `padding` have a number for each of the last one, two or three dimensions
    of `x`.
    """
    if len(kernel) == 1:
        flat = (1, *kernel), (1, *stride), (0, *padding)
        # In place, as callers may not change a view in place that an autograd function returns.
        return _average(x.unsqueeze(2), *flat, ceil_mode, divisor).squeeze_(2)
    pool = F.avg_pool2d if len(kernel) == 2 else F.avg_pool3d
    return pool(x, kernel, stride, padding, ceil_mode, divisor_override=divisor)


def _power_average(function: Any, average: Any, spatial: int) -> None:
    @implements(function)
    def rule(
        input: DistTensor,
        norm_type: float,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        ceil_mode: bool = False,
    ) -> Tensor:
        """Return the p-norm over windows, computed from an average as in torch."""
        if not isinstance(kernel_size, int) and (spatial == 1 or len(kernel_size) != spatial):
            expected = "a number" if spatial == 1 else f"a number or {spatial} of them"
            raise TypeError(f"lp_pool{spatial}d: kernel_size={kernel_size!r}; expected {expected}")
        mean: Any = average(input.pow(norm_type), kernel_size, stride, 0, ceil_mode)
        total = torch.sign(mean) * F.relu(torch.abs(mean))
        return total.mul(prod(to_tuple(kernel_size, spatial, "kernel_size"))).pow(1.0 / norm_type)


_avg_pool(F.avg_pool1d, 1)
_avg_pool(F.avg_pool2d, 2)
_avg_pool(F.avg_pool3d, 3)
_power_average(F.lp_pool1d, F.avg_pool1d, 1)
_power_average(F.lp_pool2d, F.avg_pool2d, 2)
_power_average(F.lp_pool3d, F.avg_pool3d, 3)
