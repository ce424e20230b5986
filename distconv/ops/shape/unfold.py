"""Tensor.unfold, F.unfold and F.fold, and complex numbers viewed as pairs of reals."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from distconv.geometry.index_maps import IndexMap, Same, Window
from distconv.ops.shape.reshape import flatten
from distconv.ops.support.arguments import (
    Sizes,
    accepts_unbatched,
    any_type,
    check_on_meta,
    normalize_dim,
)
from distconv.ops.support.operands import Placement, box_on_rank, empty_block, uncut
from distconv.ops.support.windows import (
    gather_windows,
    make_windows,
    plan_windows,
    window_arguments,
)
from distconv.tensor.aliasing import make_view
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import gather_inputs, overwrite

# Views by sliding windows (Tensor.unfold), and of complex numbers as pairs of reals and back.


@implements(torch.Tensor.unfold)
def unfold(input: DistTensor, dimension: int, size: int, step: int) -> DistTensor:
    shape = check_on_meta(torch.Tensor.unfold, any_type(input), dimension, size, step)
    d = normalize_dim(dimension, input.dim())
    needs: list[IndexMap] = [Same()] * input.dim()
    moved = bool(input.dim() and input.cuts[d])
    if moved:
        needs[d] = Window(size, step)
    buffer = gather_inputs(input, needs, input.cuts, "unfold")
    cuts = (*input.cuts, ()) if input.dim() else ((),)
    block = box_on_rank(shape, cuts, input.grid).shape
    if moved and 0 in block:
        shard = empty_block(buffer, block)
    else:
        shard = buffer.unfold(d, size, step) if moved else input.shard.unfold(d, size, step)

    def write(base: DistTensor, view: DistTensor) -> None:
        for i in range(size):
            run = slice(i, i + (shape[d] - 1) * step + 1, step)
            base[(*(slice(None),) * d, run)] = view[..., i]

    return make_view(
        input,
        shard,
        shape,
        cuts,
        lambda base: unfold(base, dimension, size, step),
        write if moved else None,
        writable=step >= size or shape[d] == 1,
    )


@implements(torch.view_as_real)
def view_as_real(input: DistTensor) -> DistTensor:
    shape = check_on_meta(torch.view_as_real, input)
    shard = torch.view_as_real(input.shard)
    return make_view(input, shard, shape, (*input.cuts, ()), view_as_real)


@implements(torch.view_as_complex)
def view_as_complex(input: DistTensor) -> DistTensor:
    shape = check_on_meta(torch.view_as_complex, input)
    x = uncut(input, [input.dim() - 1], "view_as_complex")
    # Whether the numbers of a block are stored in pairs may differ between ranks.
    shard = torch.view_as_complex(x.shard.contiguous())

    def write(base: DistTensor, view: DistTensor) -> None:
        overwrite(base, view_as_real(view), "view_as_complex")

    return make_view(input, shard, shape, x.cuts[:-1], view_as_complex, write)


# F.unfold, which returns the windows of a plane as columns, and its inverse F.fold.


@implements(F.unfold)
@accepts_unbatched("unfold", 2)
def unfold_to_columns(
    input: DistTensor,
    kernel_size: Sizes,
    dilation: Sizes = 1,
    padding: Sizes = 0,
    stride: Sizes = 1,
) -> DistTensor:
    check_on_meta(F.unfold, any_type(input), kernel_size, dilation, padding, stride)
    windows = make_windows(kernel_size, stride, padding, dilation, False, 2)
    kernels, strides, _, dilations = window_arguments(windows)

    x = uncut(input, [1], "unfold")
    plan = plan_windows(Placement.of(x), windows, input.shape[1] * prod(kernels))
    buffer = gather_windows(x, plan, "unfold")
    columns = F.unfold(buffer, kernels, dilations, plan.left, strides)
    padded = [n + 2 * p for n, p in zip(buffer.shape[2:], plan.left, strict=True)]
    rows, width = ((n - w.extent) // w.stride + 1 for n, w in zip(padded, windows, strict=True))
    planes = plan.outputs(columns.view(*columns.shape[:2], rows, width))
    return flatten(DistTensor(planes, plan.shape, x.cuts, x.grid), 2)


@implements(F.fold)
def fold(
    input: DistTensor,
    output_size: Sizes,
    kernel_size: Sizes,
    dilation: Sizes = 1,
    padding: Sizes = 0,
    stride: Sizes = 1,
) -> DistTensor:
    """Return the sums of columns at their windows, partitioned over samples only. Collective."""
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
