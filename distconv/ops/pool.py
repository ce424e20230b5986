"""Pooling on cut planes: maximum, average, and their adaptive forms.

Windows may overlap, so the backward pass sends the gradients of halo elements back to their owner,
where they are added up: the reverse halo exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.layout import Box, Cuts
from distconv.ops.align import box_of
from distconv.ops.checked import checked, shape_of
from distconv.ops.moments import accumulated
from distconv.ops.reduction import mean
from distconv.ops.windowed import (
    Sizes,
    apply_windows,
    arguments_of,
    batched,
    output_shape,
    windows_of,
)
from distconv.tensor import DistTensor, gathered, implements
from distconv.window import AdaptiveWindow, Same, Window


def some_channel(x: Tensor) -> Tensor:
    """`x` itself, or its empty batch with one channel: torch pools nothing without channels."""
    return x if x.shape[1] else x.reshape(0, 1, *x.shape[2:])


def lowest(x: Tensor) -> float:
    """What no element of the type of `x` is smaller than."""
    return -torch.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min


def starts_of(input: DistTensor, windows: Sequence[Window], box: Box) -> list[int]:
    """Where in the plane the buffer of inputs for the block `box` of outputs starts.

    Along a dimension that is not cut the local operator pads by itself, outside the buffer.
    """
    return [
        w.intervals(n, a, b)[0][0] if axes else 0
        for w, n, a, b, axes in zip(
            windows, input.shape[2:], box.start[2:], box.stop[2:], input.cuts[2:], strict=True
        )
    ]


def inner_border(buffer: Tensor, windows: Sequence[Window], starts: Sequence[int]) -> Tensor:
    """The fresh buffer with elements of the plane in place of the padding before it.

    A position there repeats the first one in the plane of the windows that it begins. Maxima are
    the same, and a window of nothing but `lowest` finds its own in the plane, as in torch.
    """
    for d, (window, start) in enumerate(zip(windows, starts, strict=True), 2):
        if start < 0:
            last = buffer.shape[d] - 1
            first = [min(p % window.dilation - start, last) for p in range(start, 0)]
            inner = buffer.index_select(d, torch.tensor(first, device=buffer.device))
            buffer.narrow(d, 0, -start).copy_(inner)
    return buffer


def _max_pool(local: Callable[..., Tensor], functions: Sequence[Any], n: int) -> None:
    name = f"max_pool{n}d"

    @implements(*functions)
    @batched(name, n)
    def rule(
        input: DistTensor,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,  # torch asks for indices by another function
    ) -> DistTensor:
        windows = windows_of(kernel_size, stride, padding, dilation, ceil_mode, n)
        kernels, strides, paddings, dilations = arguments_of(windows)
        checked(local, shape_of(input), kernels, strides, paddings, dilations, ceil_mode)
        shape = output_shape(input.shape[1], input, windows)
        box = box_of(shape, input.cuts, input.grid)

        def compute(buffer: Tensor, left: tuple[int, ...]) -> Tensor:
            if prod(box.shape):
                buffer = inner_border(buffer, windows, starts_of(input, windows, box))
            return local(some_channel(buffer), kernels, strides, left, dilations, ceil_mode)

        return apply_windows(input, windows, shape, name, compute, fill=lowest(input))


def _require(name: str, input: DistTensor, implemented: bool) -> None:
    """Raise for a type that torch does not pool, on ranks without elements too."""
    if not implemented:
        raise NotImplementedError(
            f"{name}: not implemented for {input.dtype}; convert it, x.float()"
        )


_AVERAGED = (torch.float64, torch.float32, torch.int64)
_HALF = (torch.float16, torch.bfloat16)
"""Types of which torch has averages, the latter in up to two dimensions."""


def _avg_pool(local: Callable[..., Tensor], n: int) -> None:
    name = f"avg_pool{n}d"

    @implements(local)
    @batched(name, n)
    def rule(
        input: DistTensor,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> DistTensor:
        _require(name, input, input.dtype in (*_AVERAGED, *(_HALF if n < 3 else ())))
        windows = windows_of(kernel_size, stride, padding, 1, ceil_mode, n)
        kernels, strides, paddings, _ = arguments_of(windows)
        # torch's one-dimensional form takes no divisor.
        override = () if n == 1 else (divisor_override,)
        arguments = (kernels, strides, paddings, ceil_mode, count_include_pad, *override)
        checked(local, shape_of(input), *arguments)
        shape = output_shape(input.shape[1], input, windows)
        box = box_of(shape, input.cuts, input.grid)

        def compute(buffer: Tensor, left: tuple[int, ...]) -> Tensor:
            if not any(input.cuts[2:]):
                return local(some_channel(buffer), *arguments)
            sums = _sum_pool(accumulated(some_channel(buffer)), kernels, strides, left, ceil_mode)
            if not buffer.numel():
                return sums.to(buffer.dtype)
            counts = [
                _counts(window, size, start, stop, count_include_pad)
                for window, size, start, stop in zip(
                    windows, input.shape[2:], box.start[2:], box.stop[2:], strict=True
                )
            ]
            rounding = None if sums.is_floating_point() else "trunc"
            divisor = divisor_override or _divisor(counts, sums)
            return torch.div(sums, divisor, rounding_mode=rounding).to(buffer.dtype)

        return apply_windows(input, windows, shape, name, compute)


def _sum_pool(
    x: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    ceil_mode: bool,
) -> Tensor:
    """The sums over windows; in one dimension by way of two, where torch can sum."""
    if len(kernel) == 1:
        flat = _sum_pool(x.unsqueeze(2), (1, *kernel), (1, *stride), (0, *padding), ceil_mode)
        return flat.squeeze(2)
    pool = F.avg_pool2d if len(kernel) == 2 else F.avg_pool3d
    return pool(x, kernel, stride, padding, ceil_mode, divisor_override=1)


def _counts(window: Window, size: int, start: int, stop: int, include_pad: bool) -> list[int]:
    """Elements along one dimension that count in the averages start to stop."""
    counts = []
    for o in range(start, stop):
        first = o * window.stride - window.padding[0]
        last = min(first + window.kernel, size + window.padding[1])
        counts.append(last - first if include_pad else min(last, size) - max(first, 0))
    return counts


def _divisor(counts: list[list[int]], like: Tensor) -> Tensor | int:
    """What each sum is divided by; one number where all windows have as many elements."""
    if all(min(c) == max(c) for c in counts):
        return prod(c[0] for c in counts)
    divisor = like.new_ones(())
    for c in counts:
        divisor = divisor.unsqueeze(-1) * like.new_tensor(c)
    return divisor


def _adaptive(
    name: str, input: DistTensor, output_size: Any, pool: Callable[..., Tensor], n: int
) -> DistTensor:
    """Adaptive pooling with windows that differ from output to output.

    A dimension with fewer outputs than parts becomes whole on every rank, which are thereby spared
    empty blocks; in the heads of networks it is about to be flattened anyway.
    """
    windows = [AdaptiveWindow(m) for m in _adaptive_sizes(output_size, tuple(input.shape[2:]), n)]
    shape = output_shape(input.shape[1], input, windows)
    cuts: Cuts = tuple(
        axes if m >= input.grid.topology.parts(axes) else ()
        for m, axes in zip(shape, input.cuts, strict=True)
    )
    buffer = gathered(input, (Same(), Same(), *windows), cuts, name)
    box = box_of(shape, cuts, input.grid)
    if 0 in box.shape:
        return DistTensor(buffer.reshape(box.shape), shape, cuts, input.grid)
    steps = [
        _cells(window, size, start, stop)
        for window, size, start, stop in zip(
            windows, input.shape[2:], box.start[2:], box.stop[2:], strict=True
        )
    ]
    cells = [pool(buffer[:, :, *cell], 1).flatten(2) for cell in product(*steps)]
    return DistTensor(torch.cat(cells, 2).reshape(box.shape), shape, cuts, input.grid)


def _cells(window: AdaptiveWindow, size: int, start: int, stop: int) -> list[slice]:
    """Where the buffer holds the inputs of each of the outputs start to stop."""
    bounds = [window.window(size, o) for o in range(start, stop)]
    return [slice(a - bounds[0][0], b - bounds[0][0]) for a, b in bounds]


def _adaptive_sizes(output_size: Any, sizes: tuple[int, ...], n: int) -> tuple[int, ...]:
    if output_size is None or isinstance(output_size, int):
        output_size = (output_size,) * n
    if len(output_size) != n:
        raise RuntimeError(f"output_size={tuple(output_size)} should have {n} values")
    outputs = tuple(size if m is None else m for m, size in zip(output_size, sizes, strict=True))
    if min(outputs) < 0 or min(sizes) < 1:
        raise RuntimeError(
            f"output_size={outputs} of a plane of {sizes}: the plane must have elements, and no "
            "output size be negative"
        )
    return outputs


def _adaptive_avg_pool(local: Callable[..., Tensor], n: int) -> None:
    name = f"adaptive_avg_pool{n}d"

    @implements(local)
    @batched(name, n)
    def rule(input: DistTensor, output_size: Any) -> DistTensor:
        _require(name, input, input.is_floating_point() or input.is_complex())
        outputs = _adaptive_sizes(output_size, tuple(input.shape[2:]), n)
        if not any(input.cuts[2:]):
            shape = (*input.shape[:2], *outputs)
            if input.shard.numel():
                shard = local(input.shard, outputs)
            else:
                shard = input.shard.reshape(box_of(shape, input.cuts, input.grid).shape)
            return DistTensor(shard, shape, input.cuts, input.grid)
        # An average over a whole dimension is a sum over ranks, with no gathering at all.
        over = [d for d, m in enumerate(outputs, 2) if m == 1]
        pooled = mean(input, over, keepdim=True) if over else input
        if outputs == tuple(pooled.shape[2:]):
            return (
                pooled
                if over
                else DistTensor(pooled.shard.clone(), pooled.shape, pooled.cuts, pooled.grid)
            )
        return _adaptive(name, pooled, outputs, local, n)


def _adaptive_max_pool(local: Callable[..., Any], function: Any, n: int) -> None:
    name = f"adaptive_max_pool{n}d"

    def pool(x: Tensor, output_size: Any) -> Tensor:
        values: Tensor = local(x, (output_size,) * n)[0]
        return values

    @implements(function)
    @batched(name, n)
    def rule(input: DistTensor, output_size: Any, return_indices: bool = False) -> DistTensor:
        _require(name, input, input.is_floating_point())
        return _adaptive(name, input, output_size, pool, n)


_max_pool(torch.max_pool1d, (F.max_pool1d, torch.max_pool1d), 1)
_max_pool(torch.max_pool2d, (F.max_pool2d, torch.max_pool2d), 2)
_max_pool(torch.max_pool3d, (F.max_pool3d, torch.max_pool3d), 3)
_avg_pool(F.avg_pool1d, 1)
_avg_pool(F.avg_pool2d, 2)
_avg_pool(F.avg_pool3d, 3)
_adaptive_avg_pool(F.adaptive_avg_pool1d, 1)
_adaptive_avg_pool(F.adaptive_avg_pool2d, 2)
_adaptive_avg_pool(F.adaptive_avg_pool3d, 3)
_adaptive_max_pool(torch.adaptive_max_pool1d, F.adaptive_max_pool1d, 1)
_adaptive_max_pool(torch._C._nn.adaptive_max_pool2d, F.adaptive_max_pool2d, 2)
_adaptive_max_pool(torch._C._nn.adaptive_max_pool3d, F.adaptive_max_pool3d, 3)
