"""The inverse of max pooling with places in the global plane.

Indices from max pooling lie within the window of their input, and neighbours exchange halos of
inputs, as for a transposed convolution. If any index lies elsewhere, the plane is gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.comm.collectives import all_reduce
from distconv.geometry.index_maps import IndexMap, Same, TransposedWindow
from distconv.geometry.layout import Box, Shape, cutting_axes
from distconv.ops.support.arguments import Sizes, accepts_unbatched, to_tuple
from distconv.ops.support.operands import (
    as_distributed,
    box_on_rank,
    empty_block,
    global_indices,
    uncut,
    unravel,
)
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import gather_inputs, redistribute
from distconv.torch_private import unpooled_size


def _unpool(function: Callable[..., Tensor], n: int) -> None:
    name = f"max_unpool{n}d"

    @implements(function)
    @accepts_unbatched(name, n)
    def rule(
        input: DistTensor,
        indices: Tensor,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        output_size: Any = None,
    ) -> DistTensor:
        if indices.dim() < input.dim():
            indices = indices.unsqueeze(0)
        indices = as_distributed(indices, input.grid)
        if indices.shape != input.shape:
            raise RuntimeError(
                f"{name}: the indices have shape {tuple(indices.shape)}, the input "
                f"{tuple(input.shape)}; they must be the same"
            )
        size = None if output_size is None else tuple(output_size)
        kernels = to_tuple(kernel_size, n, "kernel_size")
        strides = kernels if stride is None else to_tuple(stride, n, "stride")
        paddings = to_tuple(padding, n, "padding")
        plane = tuple(unpooled_size(input, list(kernels), list(strides), list(paddings), size))
        shape = (*input.shape[:2], *plane)
        windows = [
            TransposedWindow(k, s, 1, p, made - ((m - 1) * s + k - 2 * p))
            for k, s, p, m, made in zip(
                kernels, strides, paddings, input.shape[2:], plane, strict=True
            )
        ]
        indices = redistribute(indices, input.cuts, name)
        if any(input.cuts[2:]) and _within(windows, indices, plane):
            return _from_neighbours(input, indices, windows, shape, name)
        x = uncut(input, range(2, input.dim()), name)
        box = box_on_rank(shape, x.cuts, x.grid)
        index = redistribute(indices, x.cuts, name).shard
        if not prod(box.shape):
            return DistTensor(empty_block(x.shard, box.shape), shape, x.cuts, x.grid)
        shard = function(x.shard, index, kernels, strides, paddings, plane)
        return DistTensor(shard, shape, x.cuts, x.grid)


def _within(windows: list[TransposedWindow], indices: DistTensor, plane: Shape) -> bool:
    """Return whether every index lies in the window of its input, on all ranks. Collective.

    Returns True in a dry run, where tensors have no elements.
    """
    if indices.shard.is_meta:
        return True
    own = indices.shard.detach()
    outside = (own < 0) | (own >= prod(plane))
    inputs = global_indices(indices)[2:]
    for window, input, position in zip(windows, inputs, unravel(own, plane), strict=True):
        first = input * window.stride - window.padding
        outside |= (position < first) | (position >= first + window.kernel)
    count = all_reduce(outside.sum(), indices.grid, cutting_axes(indices.cuts))
    return not count.item()


def _from_neighbours(
    x: DistTensor, indices: DistTensor, windows: list[TransposedWindow], shape: Shape, name: str
) -> DistTensor:
    """Return the unpooled plane; each rank gathers the inputs that write to its block.

    `shape` is the global shape of the result; `name` is the called function, for records.
    """
    cut = zip(windows, x.cuts[2:], strict=True)
    needs: list[IndexMap] = [Same(), Same(), *(w if axes else Same() for w, axes in cut)]
    values = gather_inputs(x, needs, x.cuts, name)
    index = gather_inputs(indices, needs, x.cuts, name, fill=-1)
    box = box_on_rank(shape, x.cuts, x.grid)
    shard = _scatter(values, index, box, shape[2:])
    return DistTensor(shard, shape, x.cuts, x.grid)


def _scatter(values: Tensor, index: Tensor, box: Box, plane: Shape) -> Tensor:
    """Return this rank's box of a plane of zeros, with `values` at indices of the plane."""
    inside = index >= 0
    own = torch.zeros_like(index)
    block = box.shape[2:]
    for d, position in enumerate(unravel(index, plane)):
        local = position - box.start[d + 2]
        inside &= (local >= 0) & (local < block[d])
        own = own * block[d] + local
    # Indices outside the block are written to a place after it.
    beyond = prod(block)
    places = torch.where(inside, own, beyond).flatten(2)
    made = values.new_zeros((*values.shape[:2], beyond + 1))
    return made.scatter(2, places, values.flatten(2))[:, :, :beyond].reshape(box.shape)


_unpool(F.max_unpool1d, 1)
_unpool(F.max_unpool2d, 2)
_unpool(F.max_unpool3d, 3)
