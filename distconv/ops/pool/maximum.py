"""Max pooling on cut planes, with and without telling where in the global plane the maxima are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.geometry.index_maps import Window
from distconv.ops.pool.local_pooling import overlapping_ceil_mode, with_some_channel
from distconv.ops.pool.overlapped_maximum import overlapped_maxima
from distconv.ops.pool.positions import buffer_starts, fill_border, lowest_value, renumber_positions
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
        if (ceil := _overlaps(input, windows)) is not None:
            results = overlapped_maxima(input, windows, shape, ceil, name, places=places)
            return results if places else results[0]
        box = box_on_rank(shape, input.cuts, input.grid)
        starts = buffer_starts(input, windows, box) if prod(box.shape) else None
        found: list[Tensor] = []

        def compute(buffer: Tensor, left: tuple[int, ...]) -> Tensor:
            if starts is not None:
                buffer = fill_border(buffer, windows, starts)
            result = local(with_some_channel(buffer), kernels, strides, left, dilations, ceil_mode)
            if not places:
                values: Tensor = result
                return values
            values, index = result
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


def _overlaps(x: DistTensor, windows: Sequence[Window]) -> bool | None:
    """Return the ceil mode for pooling while halos travel, or None; the same on all ranks.

    Integers are assembled: torch refuses them with and without places in different cases.
    """
    return overlapping_ceil_mode(x, windows) if x.is_floating_point() else None


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
