"""The inverse of max pooling that tells where the maxima are, in the global plane."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from distconv.ops.support.argument_forms import Sizes, accepts_unbatched, to_tuple
from distconv.ops.support.operands import as_distributed, box_on_rank, empty_block, uncut
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import redistribute


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
        where = as_distributed(indices, input.grid)
        if where.shape != input.shape:
            raise RuntimeError(
                f"{name}: the indices have shape {tuple(where.shape)}, the input "
                f"{tuple(input.shape)}; they must be the same"
            )
        size = None if output_size is None else tuple(output_size)
        kernels = to_tuple(kernel_size, n, "kernel_size")
        arguments = (
            kernels,
            kernels if stride is None else to_tuple(stride, n, "stride"),
            to_tuple(padding, n, "padding"),
        )
        output_plane: Any = F._unpool_output_size  # type: ignore[attr-defined]
        plane = output_plane(input, *map(list, arguments), size)
        spatial = range(2, input.dim())
        x = uncut(input, spatial, name)
        shape = (*x.shape[:2], *plane)
        box = box_on_rank(shape, x.cuts, x.grid)
        index = redistribute(where, x.cuts, name).shard
        if not prod(box.shape):
            return DistTensor(empty_block(x.shard, box.shape), shape, x.cuts, x.grid)
        shard = function(x.shard, index, *arguments, tuple(plane))
        return DistTensor(shard, shape, x.cuts, x.grid)


_unpool(F.max_unpool1d, 1)
_unpool(F.max_unpool2d, 2)
_unpool(F.max_unpool3d, 3)
