"""Max pooling on cut planes, with and without the places of the maxima in the global plane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.comm.shard_function import ShardFunction
from distconv.ops.pool.local_pooling import unread_input, with_some_channel
from distconv.ops.pool.positions import (
    Border,
    borders,
    buffer_starts,
    lowest_value,
    renumber_positions,
)
from distconv.ops.support.argument_forms import Sizes, accepts_unbatched
from distconv.ops.support.metadata_checks import any_type, check_on_meta
from distconv.ops.support.operands import box_on_rank, empty_block
from distconv.ops.windowed.assembled import (
    apply_windows,
    make_windows,
    output_shape,
    window_arguments,
)
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor
from distconv.torch_private import max_pool_with_places


def _max_pool(local: Callable[..., Any], functions: Sequence[Any], n: int, *, places: bool) -> None:
    """Register max pooling by torch's local function; with `places` it returns their places too."""
    name = f"max_pool{n}d"

    @implements(*functions)
    @accepts_unbatched(name, n)
    def rule(
        input: DistTensor,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
        return_indices: bool = places,  # torch asks for indices by another function
    ) -> Any:
        windows = make_windows(kernel_size, stride, padding, dilation, ceil_mode, n)
        kernels, strides, paddings, dilations = window_arguments(windows)
        check_on_meta(local, any_type(input), kernels, strides, paddings, dilations, ceil_mode)
        shape = output_shape(input.shape[1], input, windows)
        box = box_on_rank(shape, input.cuts, input.grid)
        starts = buffer_starts(input, windows, box) if prod(box.shape) else None
        found: list[Tensor] = []

        def compute(buffer: Tensor, left: tuple[int, ...]) -> Tensor:
            border = [] if starts is None else borders(buffer.shape[2:], windows, starts)
            x, arguments = with_some_channel(buffer), (kernels, strides, left, dilations, ceil_mode)
            if n > 1 and any(input.cuts[2:]) and x.is_floating_point():
                values, index = _MaxPool.apply(x, arguments, border)
            else:
                for part in border:
                    part.fill(x)
                made = local(x, *arguments)
                values, index = made if places else (made, None)
            if not places:
                return values
            if starts is None:
                found.append(empty_block(index, box.shape))
            else:
                plane = input.shape[2:]
                found.append(renumber_positions(index, buffer.shape[2:], starts, windows, plane))
            return values

        values = apply_windows(input, windows, shape, name, compute, fill=lowest_value(input))
        if not places:
            return values
        return values, DistTensor(found[0], shape, values.cuts, input.grid)


class _MaxPool(ShardFunction):
    """torch's max pooling of a buffer with filled borders; it saves places, not the buffer."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, arguments: tuple[Any, ...], border: Sequence[Border]
    ) -> tuple[Tensor, Tensor]:
        for part in border:
            part.fill(x)
        values, index = max_pool_with_places[x.dim() - 2](x, *arguments)
        ctx.save_for_backward(index)
        ctx.mark_non_differentiable(index)
        ctx.context = tuple(x.shape), arguments, border
        return values, index

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (index,), (shape, arguments, border), dy = ctx.saved_tensors, ctx.context, grads[0]
        aten = torch.ops.aten
        volume = aten.max_pool3d_with_indices_backward
        function: Any = volume if len(shape) == 5 else aten.max_pool2d_with_indices_backward
        dx: Tensor = function(dy, unread_input(shape, dy), *arguments, index)
        for part in reversed(border):
            part.fold(dx)
        return dx, None, None


_max_pool(torch.max_pool1d, (F.max_pool1d, torch.max_pool1d), 1, places=False)
_max_pool(torch.max_pool2d, (F.max_pool2d, torch.max_pool2d), 2, places=False)
_max_pool(torch.max_pool3d, (F.max_pool3d, torch.max_pool3d), 3, places=False)
_max_pool(
    torch.max_pool1d_with_indices,
    (F.max_pool1d_with_indices, torch.max_pool1d_with_indices),
    1,
    places=True,
)
_max_pool(max_pool_with_places[2], (F.max_pool2d_with_indices,), 2, places=True)
_max_pool(max_pool_with_places[3], (F.max_pool3d_with_indices,), 3, places=True)
