"""Sliding blocks as columns and back, and power-average pooling."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.ops.align import box_of, nothing, uncut
from distconv.ops.checked import checked, shape_of
from distconv.ops.shape import flatten
from distconv.ops.windowed import (
    Sizes,
    apply_windows,
    arguments_of,
    batched,
    output_shape,
    tuple_of,
    windows_of,
)
from distconv.tensor import DistTensor, implements


@implements(F.unfold)
@batched("unfold", 2)
def unfold(
    input: DistTensor,
    kernel_size: Sizes,
    dilation: Sizes = 1,
    padding: Sizes = 0,
    stride: Sizes = 1,
) -> DistTensor:
    """Every window of (N, C, H, W) as a column: (N, C * prod(kernel), windows)."""
    checked(F.unfold, shape_of(input), kernel_size, dilation, padding, stride)
    windows = windows_of(kernel_size, stride, padding, dilation, False, 2)
    kernels, strides, _, dilations = arguments_of(windows)

    def compute(buffer: Tensor, left: tuple[int, ...]) -> Tensor:
        columns = F.unfold(buffer, kernels, dilations, left, strides)
        padded = [n + 2 * p for n, p in zip(buffer.shape[2:], left, strict=True)]
        rows, width = ((n - w.extent) // w.stride + 1 for n, w in zip(padded, windows, strict=True))
        return columns.view(*columns.shape[:2], rows, width)

    shape = output_shape(input.shape[1] * prod(kernels), input, windows)
    x = uncut(input, [1], "unfold")
    planes = apply_windows(x, windows, shape, "unfold", compute)
    return flatten(planes, 2)


@implements(F.fold)
def fold(
    input: DistTensor,
    output_size: Sizes,
    kernel_size: Sizes,
    dilation: Sizes = 1,
    padding: Sizes = 0,
    stride: Sizes = 1,
) -> DistTensor:
    """Columns added up into the windows they stand for; the columns are made whole first."""
    if not (input.is_floating_point() or input.is_complex()):
        raise RuntimeError(f"fold: not implemented for {input.dtype}; convert it, x.float()")
    arguments: Any = (output_size, kernel_size, dilation, padding, stride)
    shape = checked(F.fold, shape_of(input), *arguments)
    x = uncut(input, [input.dim() - 2, input.dim() - 1], "fold")
    cuts = (*x.cuts[:-2], (), (), ())
    box = box_of(shape, cuts, x.grid)
    if 0 in box.shape:
        shard = nothing(x.shard, box.shape)
    else:
        shard = F.fold(x.shard, *arguments)
    return DistTensor(shard, shape, cuts, x.grid)


def _power_average(spatial: int, function: Any, average: Any) -> None:
    @implements(function)
    def rule(
        input: DistTensor,
        norm_type: float,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        ceil_mode: bool = False,
    ) -> Tensor:
        """The p-norm over windows, by way of an average, as torch computes it."""
        if not isinstance(kernel_size, int) and (spatial == 1 or len(kernel_size) != spatial):
            expected = "a number" if spatial == 1 else f"a number or {spatial} of them"
            raise TypeError(f"lp_pool{spatial}d: kernel_size={kernel_size!r}; expected {expected}")
        mean: Any = average(input.pow(norm_type), kernel_size, stride, 0, ceil_mode)
        total = torch.sign(mean) * F.relu(torch.abs(mean))
        return total.mul(prod(tuple_of(kernel_size, spatial, "kernel_size"))).pow(1.0 / norm_type)


_power_average(1, F.lp_pool1d, F.avg_pool1d)
_power_average(2, F.lp_pool2d, F.avg_pool2d)
_power_average(3, F.lp_pool3d, F.avg_pool3d)
