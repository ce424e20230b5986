"""Batch normalisation with statistics over the whole mini-batch, or over a part of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from distconv.comm.collectives import all_reduce, all_reduce_
from distconv.comm.packing import fills_channels_last, has_channels_last
from distconv.comm.shard_function import ShardFunction
from distconv.geometry.layout import cutting_axes
from distconv.grid.interface import Grid
from distconv.ops.norm.moments import (
    adds_up_too_many,
    element_counts_of_peers,
    moments,
    pieces_to_add_up,
)
from distconv.ops.support.first_order import first_order
from distconv.ops.support.merged import works_on_channels
from distconv.ops.support.operands import (
    Placement,
    as_distributed,
    common_grid,
    gather_whole,
    local_operand,
)
from distconv.ops.support.types import accumulation_type, in_type
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor

SPATIAL = ("depth", "height", "width")
Kind: TypeAlias = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor."""


@implements(F.batch_norm)
@works_on_channels(of_each_sample=False)
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> DistTensor:
    """Normalise a batch by the statistics of the global batch, as serial torch takes them."""
    return batch_norm_over(
        None, input, running_mean, running_var, weight, bias, training, momentum, eps
    )


@implements(torch.batch_norm)
def _batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def batch_norm_over(
    axes: tuple[str, ...] | None,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> DistTensor:
    """Normalise a batch by statistics over the ranks that differ from this one along `axes`.

    All ranks call it. None means all axes that cut the input: the global batch. With fewer axes
    each group of ranks has statistics of its own, and the running ones take their mean over the
    groups, so that they are the same on every rank.
    """
    channelwise = running_mean, running_var, weight, bias
    grid = common_grid("batch_norm", (input, *channelwise))
    x = as_distributed(input, grid)
    kinds = tuple([None if t is None else (t.shape, t.dtype) for t in channelwise])
    options = training, momentum is None, eps
    training, group, rest, counts, groups = _decide(
        Placement.of(x), axes, grid.device, *options, kinds
    )
    running: Sequence[Tensor | None] = running_mean, running_var
    if any(x.cuts[1:2]) or any([isinstance(t, DistTensor) for t in channelwise]):
        running = [gather_whole(t, "batch_norm") for t in running]
        parameters = *running, weight, bias
        running_mean, running_var, weight, bias = (
            own_channels(t, x, "batch_norm") for t in parameters
        )
        if any(x.cuts[1:2]) and running_mean is not None and running_var is not None:
            # The backward pass wants them as they are now.
            running_mean, running_var = running_mean.clone(), running_var.clone()
    block = _with_batch_stride(x.shard)
    if not training or not (group or rest or adds_up_too_many(block)):
        if x.shard.numel() or not x.numel():
            shard = F.batch_norm(
                block, running_mean, running_var, weight, bias, training, momentum, eps
            )
        else:
            shard = _without_elements(block, weight, bias)
        if training:
            gather_running_statistics(x, running, (running_mean, running_var), "batch_norm")
        return DistTensor(shard, x.shape, x.cuts, grid)

    def update(mean: Tensor, variance: Tensor) -> None:
        if running_mean is None or running_var is None:
            return
        n = sum(counts)
        variance = variance * (n / (n - 1))
        if rest:
            total = all_reduce(torch.stack([mean, variance]), grid, rest)
            mean, variance = total / groups
        running_mean.lerp_(in_type(mean, running_mean.dtype), momentum)
        running_var.lerp_(in_type(variance, running_var.dtype), momentum)
        gather_running_statistics(x, running, (running_mean, running_var), "batch_norm")

    shard = _BatchNorm.apply(block, weight, bias, grid, group, counts, eps, update)
    return DistTensor(shard, x.shape, x.cuts, grid)


def _with_batch_stride(x: Tensor) -> Tensor:
    """Return the block in the memory format that torch's kernels take it for.

    The stride of a single sample may be any number, but if it is not that of the format, the
    kernels read a gradient of the other format in the wrong order.
    """
    if not x.numel() or x.shape[0] != 1 or x.is_contiguous() or x.stride(0) == x.numel():
        return x
    return x.as_strided(x.shape, (x.numel(), *x.stride()[1:]))


class _Statistics(NamedTuple):
    """How a rank normalises a batch; remembered, as it follows from metadata."""

    training: bool
    """Whether the batch's own statistics are used: torch takes none of an empty batch."""
    group: tuple[str, ...]
    """The grid axes over which the statistics are taken."""
    rest: tuple[str, ...]
    """Other axes that cut the input."""
    counts: tuple[int, ...]
    """Elements of each channel on each rank along `group`."""
    groups: int
    """Groups of ranks that have elements, and so statistics."""


@lru_cache(maxsize=4096)
def _decide(
    x: Placement,
    axes: tuple[str, ...] | None,
    device: torch.device,
    training: bool,
    without_momentum: bool,
    eps: float,
    kinds: tuple[Kind | None, ...],
) -> _Statistics:
    elements = prod(x.shape)
    if len(x.shape) < 2 and elements:
        raise ValueError(f"batch_norm: expected at least 2 dimensions, got {len(x.shape)}")
    cutting = cutting_axes((x.cuts[0], *x.cuts[2:]))
    group = cutting if axes is None else tuple(a for a in cutting if a in axes)
    smallest, groups = _groups_with_elements(x, group)
    if training and smallest == 1:
        raise ValueError(
            "batch_norm: expected more than 1 value per channel when training, got input size "
            f"{x.shape}" + (f" with {smallest} in a group of ranks" if group != cutting else "")
        )
    if elements:
        # torch's own checks of sizes and types, on two samples of the same channels.
        like = ((2, x.shape[1]), x.dtype), *kinds
        serial: Any = F.batch_norm
        with _disable_current_modes():  # as for `check_on_meta`
            ones = [k and torch.ones(k[0], dtype=k[1], device=device) for k in like]
            serial(*ones, training, None if without_momentum else 0.0, eps)
    rest = tuple(a for a in cutting if a not in group)
    counts = element_counts_of_peers(x, (0, *range(2, len(x.shape))), group)
    return _Statistics(training and elements > 0, group, rest, counts, groups)


def own_channels(values: Tensor | None, x: DistTensor, operator: str) -> Tensor | None:
    """Return the values for this rank's channels, of one value for each channel of `x`."""
    axes = x.cuts[1] if x.dim() > 1 else ()
    if not axes:
        everything: Tensor | None = gather_whole(values, operator)
        return everything
    own: Tensor | None = local_operand(values, (x.shape[1],), (axes,), x.grid, operator)
    return own


def gather_running_statistics(
    x: DistTensor, running: Sequence[Tensor | None], own: Sequence[Tensor | None], operator: str
) -> None:
    """Give all ranks the running statistics that each has updated for its own channels of `x`.

    Where channels are not cut, every rank has updated all of them already.
    """
    if not x.cuts[1]:
        return
    pairs = [(t, o) for t, o in zip(running, own, strict=True) if t is not None and o is not None]
    if not pairs:
        return
    shape = len(pairs), x.shape[1]
    with torch.no_grad():
        rows = DistTensor(torch.stack([o for _, o in pairs]), shape, ((), x.cuts[1]), x.grid)
        for (t, _), row in zip(pairs, gather_whole(rows, operator), strict=True):
            t.copy_(row)


def _without_elements(x: Tensor, *parameters: Tensor | None) -> Tensor:
    """Return an empty result, which torch does not normalise, in the graph of all parameters."""
    block = x.clone()
    for p in parameters:
        block = block if p is None else block + p.sum().to(x.dtype)
    return block


def _groups_with_elements(x: Placement, group: tuple[str, ...]) -> tuple[int, int]:
    """Return elements per channel in the smallest group of ranks that has any, and such groups'
    number.

    The numbers are the same on every rank.
    """
    sizes = [x.shape[0], *x.shape[2:]]
    cuts = [x.cuts[0], *x.cuts[2:]]
    apart = [x.topology.parts(a for a in axes if a not in group) for axes in cuts]
    filled = [min(n, parts) for n, parts in zip(sizes, apart, strict=True)]
    smallest = prod(n // max(parts, 1) for n, parts in zip(sizes, filled, strict=True))
    return smallest, prod(filled)


class _BatchNorm(ShardFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        grid: Grid,
        group: tuple[str, ...],
        counts: tuple[int, ...],
        eps: float,
        update: Callable[[Tensor, Tensor], None],
    ) -> Tensor:
        kind = accumulation_type(x.dtype)
        over = (0, *range(2, x.dim()))
        mean, variance = moments(x, over, grid, group, counts)
        scale = torch.rsqrt(variance + eps)
        if x.numel():
            # torch takes parameters in the type of the statistics, or all in a half input's type.
            wide = None if weight is None else in_type(weight, kind)
            shift = None if bias is None else in_type(bias, kind)
            y = _normalize(x, wide, shift, mean, variance, scale, eps)
        else:
            y = x.clone()
        # Before anything is saved: there a checkpoint stops to compute again.
        update(mean, variance)
        ctx.save_for_backward(x, weight, mean, variance, scale)
        ctx.context = grid, group, sum(counts), eps, None if bias is None else bias.dtype
        return y

    @staticmethod
    @first_order("batch_norm")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance, scale = ctx.saved_tensors
        grid, group, count, eps, bias_dtype = ctx.context
        dy = _with_batch_stride(grads[0])
        of_weight, of_bias = _sums(dy, x, mean, variance, scale, eps)
        total = torch.stack([of_weight, of_bias])
        if group:
            all_reduce_(total, grid, group)
        gain = scale if weight is None else scale * weight
        # dx = gain * (dy - mean(dy) - standardised x * mean(dy * standardised x)), in two passes.
        slope, offset = total.mul_(gain / -count).unbind()
        if x.numel():
            dx = _normalize(x, slope, offset, mean, variance, scale, eps)
            dx.addcmul_(dy, _by_channel(gain, dy))
        else:
            dx = torch.zeros_like(x)
        return (
            dx,
            None if weight is None else in_type(of_weight, weight.dtype),
            None if bias_dtype is None else in_type(of_bias, bias_dtype),
            *(None,) * 5,
        )


_FEWEST_CHANNELS = 16
_FEWEST_ELEMENTS = 2**17
"""Channels and elements from which `addcmul` was measured to normalise a block with channels last
faster than torch's batch norm: in 0.8 of its time, and in 0.65 with twice as many elements."""


def _normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    scale: Tensor,
    eps: float,
) -> Tensor:
    """Return (x - mean) * scale * weight + bias, where each factor has one value per channel.

    `scale` is 1 / sqrt(variance + eps). On CPUs torch's batch norm multiplies a block without gaps
    by one number per channel and adds another. `addcmul` does the same where that is faster; it
    takes no statistics of another type than the block's, as those of halves are.
    """
    large = x.numel() >= _FEWEST_ELEMENTS and x.shape[1] >= _FEWEST_CHANNELS
    if not large or x.is_cuda or x.dtype != mean.dtype or not fills_channels_last(x):
        y, _, _ = torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)
        return y
    gain = scale if weight is None else scale * weight
    shift = -mean * gain if bias is None else torch.addcmul(bias, mean, gain, value=-1)
    return torch.addcmul(_by_channel(shift, x), x, _by_channel(gain, x))


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    """Return one value for each channel of `x` in a shape that is broadcast to it."""
    return values.view(1, -1, *(1,) * (x.dim() - 2))


def _sums(
    dy: Tensor, x: Tensor, mean: Tensor, variance: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return, per channel, the sums of dy * (x - mean) / deviation and of dy over this rank's
    elements.

    They are its parts of the gradients of weight and bias.
    """
    if not x.numel():
        nothing = torch.zeros_like(mean)
        return nothing, nothing
    # torch takes mean and variance on CPUs; mean, scale and the type of the weight on GPUs.
    statistics = (mean, mean, variance, mean, scale, False, eps, [False, True, True])
    sums = torch.ops.aten.native_batch_norm_backward
    if not (adds_up_too_many(x) and has_channels_last(dy)):
        _, of_weight, of_bias = sums(dy, x, *statistics)
        return of_weight, of_bias
    pieces = zip(pieces_to_add_up(dy), pieces_to_add_up(x), strict=True)
    parts = [sums(*piece, *statistics)[1:] for piece in pieces]
    of_weight, of_bias = (torch.stack(p).sum(0) for p in zip(*parts, strict=True))
    return of_weight, of_bias
