"""Max pooling that tells where the maxima are, in the global plane, and its inverse."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.ops.align import box_of, distributed, nothing, uncut
from distconv.ops.checked import checked, shape_of
from distconv.ops.pool import inner_border, lowest, some_channel, starts_of
from distconv.ops.windowed import (
    Sizes,
    apply_windows,
    arguments_of,
    batched,
    output_shape,
    tuple_of,
    windows_of,
)
from distconv.tensor import DistTensor, implements, recut


def _ravel(coordinates: list[Tensor], plane: tuple[int, ...]) -> Tensor:
    """The row-major number of positions in a plane."""
    number = torch.zeros_like(coordinates[0])
    for coordinate, size in zip(coordinates, plane, strict=True):
        number = number * size + coordinate
    return number


def _unravel(number: Tensor, plane: tuple[int, ...]) -> list[Tensor]:
    """The coordinates of row-major numbers in a plane."""
    coordinates: list[Tensor] = []
    for size in reversed(plane):
        coordinates.insert(0, number % size)
        number = number // size
    return coordinates


def _with_indices(function: Callable[..., Any], local: Callable[..., Any], n: int) -> None:
    name = f"max_pool{n}d"

    @implements(function)
    @batched(name, n)
    def rule(
        input: DistTensor,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
        return_indices: bool = True,
    ) -> tuple[DistTensor, DistTensor]:
        windows = windows_of(kernel_size, stride, padding, dilation, ceil_mode, n)
        kernels, strides, paddings, dilations = arguments_of(windows)
        checked(local, shape_of(input), kernels, strides, paddings, dilations, ceil_mode)
        shape = output_shape(input.shape[1], input, windows)
        box = box_of(shape, input.cuts, input.grid)
        plane = tuple(input.shape[2:])
        found: list[Tensor] = []

        def compute(buffer: Tensor, left: tuple[int, ...]) -> Tensor:
            arguments = kernels, strides, left, dilations, ceil_mode
            if not prod(box.shape):
                values, index = local(some_channel(buffer), *arguments)
                found.append(nothing(index, box.shape))
                return values
            starts = starts_of(input, windows, box)
            values, index = local(inner_border(buffer, windows, starts), *arguments)
            local_plane = _unravel(index, tuple(buffer.shape[2:]))
            global_plane = [c + start for c, start in zip(local_plane, starts, strict=True)]
            # What lies before the plane repeats elements of it.
            inside = [
                torch.where(c < 0, c % d, c) for c, d in zip(global_plane, dilations, strict=True)
            ]
            found.append(_ravel(inside, plane))
            return values

        values = apply_windows(input, windows, shape, name, compute, fill=lowest(input))
        return values, DistTensor(found[0], shape, values.cuts, input.grid)


def _unpool(function: Callable[..., Tensor], n: int) -> None:
    name = f"max_unpool{n}d"

    @implements(function)
    @batched(name, n)
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
        where = distributed(indices, input.grid)
        if where.shape != input.shape:
            raise RuntimeError(
                f"{name}: the indices have shape {tuple(where.shape)}, the input "
                f"{tuple(input.shape)}; they must be the same"
            )
        size = None if output_size is None else tuple(output_size)
        kernels = tuple_of(kernel_size, n, "kernel_size")
        arguments = (
            kernels,
            kernels if stride is None else tuple_of(stride, n, "stride"),
            tuple_of(padding, n, "padding"),
        )
        output_plane: Any = F._unpool_output_size  # type: ignore[attr-defined]
        plane = output_plane(input, *map(list, arguments), size)
        spatial = range(2, input.dim())
        x = uncut(input, spatial, name)
        shape = (*x.shape[:2], *plane)
        box = box_of(shape, x.cuts, x.grid)
        index = recut(where, x.cuts, name).shard
        if not prod(box.shape):
            return DistTensor(nothing(x.shard, box.shape), shape, x.cuts, x.grid)
        shard = function(x.shard, index, *arguments, tuple(plane))
        return DistTensor(shard, shape, x.cuts, x.grid)


_with_indices(F.max_pool1d_with_indices, torch.max_pool1d_with_indices, 1)
_with_indices(F.max_pool2d_with_indices, torch._C._nn.max_pool2d_with_indices, 2)
_with_indices(F.max_pool3d_with_indices, torch._C._nn.max_pool3d_with_indices, 3)
_unpool(F.max_unpool1d, 1)
_unpool(F.max_unpool2d, 2)
_unpool(F.max_unpool3d, 3)
