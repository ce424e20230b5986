"""F.unfold, which returns the windows of a plane as columns, and its inverse F.fold."""

from __future__ import annotations

from math import prod
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from distconv.ops.shape.reshape import flatten
from distconv.ops.support.argument_forms import Sizes, accepts_unbatched
from distconv.ops.support.metadata_checks import any_type, check_on_meta
from distconv.ops.support.operands import Placement, box_on_rank, empty_block, uncut
from distconv.ops.windowed.assembled import (
    apply_windows,
    make_windows,
    plan_windows,
    window_arguments,
)
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor


@implements(F.unfold)
@accepts_unbatched("unfold", 2)
def unfold(
    input: DistTensor,
    kernel_size: Sizes,
    dilation: Sizes = 1,
    padding: Sizes = 0,
    stride: Sizes = 1,
) -> DistTensor:
    check_on_meta(F.unfold, any_type(input), kernel_size, dilation, padding, stride)
    windows = make_windows(kernel_size, stride, padding, dilation, False, 2)
    kernels, strides, _, dilations = window_arguments(windows)

    def compute(buffer: Tensor, left: tuple[int, ...]) -> Tensor:
        columns = F.unfold(buffer, kernels, dilations, left, strides)
        padded = [n + 2 * p for n, p in zip(buffer.shape[2:], left, strict=True)]
        rows, width = ((n - w.extent) // w.stride + 1 for n, w in zip(padded, windows, strict=True))
        return columns.view(*columns.shape[:2], rows, width)

    x = uncut(input, [1], "unfold")
    plan = plan_windows(Placement.of(x), windows, input.shape[1] * prod(kernels))
    planes = apply_windows(x, plan, "unfold", compute)
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
    """Return planes to which each column is added at its window; columns are made whole first."""
    if not (input.is_floating_point() or input.is_complex()):
        raise NotImplementedError(f"fold: not implemented for {input.dtype}; convert it, x.float()")
    arguments: Any = (output_size, kernel_size, dilation, padding, stride)
    shape = check_on_meta(F.fold, any_type(input), *arguments)
    x = uncut(input, [input.dim() - 2, input.dim() - 1], "fold")
    cuts = (*x.cuts[:-2], (), (), ())
    box = box_on_rank(shape, cuts, x.grid)
    if 0 in box.shape:
        shard = empty_block(x.shard, box.shape)
    else:
        shard = F.fold(x.shard, *arguments)
    return DistTensor(shard, shape, cuts, x.grid)
