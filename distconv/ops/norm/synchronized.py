"""Batch norm and group norm on accelerators, by torch's kernels for synchronised batch norm.

torch.nn.SyncBatchNorm uses the same kernels. Each kernel replaces several operators by one launch:
statistics of a block, the combination of statistics over ranks with the update of running
statistics, the normalisation, and in backward the sums and the input gradient. A launch takes 5 to
10 us of host time, which decides the speed of small blocks. All arguments are contiguous, as some
kernels ignore strides. The choice of kernels depends on the memory format and the size of a rank's
block; the messages do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from distconv.comm.collectives import all_gather, all_reduce_
from distconv.grid.interface import Grid
from distconv.ops.norm.statistics import (
    Form,
    Norm,
    RunningStatistics,
    divisor_from,
    in_format_of,
    recorded_gradients,
)
from distconv.ops.support.operands import accumulation_type, constant, in_type
from distconv.torch_private import ShardFunction


class SynchronizedNorm(ShardFunction):
    """An autograd function that normalises a block (N, C, *spatial) by statistics over ranks.

    Each channel has its own statistics, or each sample and group of channels if
    `norm.form.of_each_sample`. In the second case the block is contiguous, and the kernels see one
    sample of N * C channels, each with the mean and deviation of its group.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        norm: Norm,
        grid: Grid,
        running: RunningStatistics | None,
    ) -> Tensor:
        form, eps = norm.form, norm.eps
        own = _statistics_of_groups(x, form, eps) if form.of_each_sample else _of_channels(x, eps)
        mean, invstd = _combined(*own, norm, grid, running)
        ctx.save_for_backward(x, weight, mean, invstd)
        ctx.context = norm, grid, None if bias is None else bias.dtype
        weight, bias = (_for_kernel(p, x, form, mean.dtype) for p in (weight, bias))
        return _affine(x, _channels(x, form), weight, bias, mean, invstd, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd = ctx.saved_tensors
        norm, grid, bias = ctx.context
        if torch.is_grad_enabled():
            made = recorded_gradients(grads[0], x, weight, norm, grid)
        else:
            made = _gradients(grads[0], x, weight, mean, invstd, norm, grid)
        dx, dweight, dbias = made
        return (
            dx,
            None if weight is None else in_type(dweight, weight.dtype),
            None if bias is None else in_type(dbias, bias),
            *(None,) * 3,
        )


def _channels(x: Tensor, form: Form) -> tuple[int, int]:
    """Return the numbers of samples and of channels that the kernels see for the block `x`.

    The result is (N, C), or (1, N * C) if each sample has its own statistics.
    """
    n, c = x.shape[:2]
    return (1, n * c) if form.of_each_sample else (n, c)


def _for_kernel(
    parameter: Tensor | None, x: Tensor, form: Form, dtype: torch.dtype
) -> Tensor | None:
    """Return a weight or bias with a number for each channel that the kernels see; None for None.

    The result is contiguous and has the type `dtype`.
    """
    if parameter is None:
        return None
    parameter = in_type(parameter, dtype)
    if form.of_each_sample:
        return parameter.expand(x.shape[:2]).reshape(-1)
    return parameter.contiguous()


def _statistics_of_groups(x: Tensor, form: Form, eps: float) -> tuple[Tensor, Tensor]:
    """Return this rank's mean and 1 / sqrt(variance + eps) of each sample and group of channels.

    Both are expanded to the shape (N * groups, channels of a group).
    """
    groups = x.shape[0] * form.groups
    own = _of_channels(x.view(1, groups, x.numel() // max(groups, 1)), eps)
    mean, invstd = (t.unsqueeze(1).expand(groups, x.shape[1] // max(form.groups, 1)) for t in own)
    return mean, invstd


def _gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    norm: Norm,
    grid: Grid,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias, for the gradient `dy` of the norm's output.

    Gradients of weight and bias are sums over this rank's block. Collective over the ranks along
    `norm.group`.
    """
    form, (n, c) = norm.form, x.shape[:2]
    split = n, form.groups, c // max(form.groups, 1)
    dy, weight = in_format_of(dy, x), _for_kernel(weight, x, form, mean.dtype)
    dbias, of_deviation, dweight = _sums(dy, x, _channels(x, form), mean, invstd)
    total = torch.stack([dbias, of_deviation])
    if form.of_each_sample:
        total = (total if weight is None else total * weight).view(2, *split)
        if split[2] != 1:
            total = total.sum(3, keepdim=True)
    if norm.group:
        all_reduce_(total, grid, norm.group)
    if form.of_each_sample:
        total = total.expand(2, *split).reshape(2, -1)
    dx = _gradient_of_input(dy, x, weight, mean, invstd, total, norm)
    if form.of_each_sample and n != 1:
        dweight, dbias = (t.view(n, c).sum(0) for t in (dweight, dbias))
    return dx, dweight, dbias


def _gradient_of_input(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    total: Tensor,
    norm: Norm,
) -> Tensor:
    """Return the gradient of the input.

    dx = invstd * (w * dy - mean(w * dy) - standardised x * mean(w * dy * standardised x))

    Parameters
    ----------
    weight, mean, invstd: a number for each channel that the kernels see; `weight` may be None.
    total: for each channel the sums over all ranks of dy and of dy * (x - mean). If each sample has
        its own statistics, the sums of w * dy and of w * dy * (x - mean) over the channel's group.
    """
    if not x.numel():
        return torch.empty_like(x)
    channels, weighted = _channels(x, norm.form), norm.form.of_each_sample
    of_block = -1, x.shape[1], *(1,) * (x.dim() - 2)
    if _run_length(x, channels):
        gain = invstd if weight is None else invstd * weight
        slopes = invstd if weighted else gain
        zero = constant(x.device, (0,), mean.dtype)
        scaled = torch.addcmul(zero, total, slopes, value=-1 / max(sum(norm.counts), 1))
        dx = _affine(x, channels, scaled[1] * invstd, scaled[0], mean, invstd, norm.eps)
        return dx.addcmul_(dy, gain.view(of_block))
    if weighted and weight is not None:
        dy, weight = dy * in_type(weight, dy.dtype).view(of_block), None
    if weighted:
        dy, block = dy.view(*channels, -1), x.view(*channels, -1)
    else:
        block = x
    numbers = constant(x.device, norm.counts, torch.int32)
    dx = torch.batch_norm_backward_elemt(
        dy, block, mean, invstd, weight, total[0], total[1], numbers
    )
    return dx.view(x.shape)


_RUN, _MANY = 2**15, 2**16
"""The fewest elements of a run, and of a channel of one sample that is divided into runs.

torch's kernels sum each channel in one block of threads, which leaves most of an accelerator idle
if channels are few and large. On an H100 the statistics of 64 channels of 2**19 elements take 431
us, and 69 us in runs of 2**16 elements. For 128 channels of 2**15 elements the times are 17 and 13
us, but runs need eight more launches for both passes."""


def _run_length(x: Tensor, channels: Sequence[int]) -> int | None:
    """Return the number of elements of a run, or None if the kernels should not divide the block.

    The kernels see the block as (N, C, positions); `channels` is (N, C).
    """
    positions = x.numel() // prod(channels)
    if positions < _MANY or not x.is_contiguous():
        return None
    return divisor_from(positions, _RUN)


def _of_channels(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / sqrt(variance + eps) of each channel of this rank's block `x`.

    Both have shape (C,), and are zero for a block without elements.
    """
    channels = x.shape[1]
    if not x.numel():
        zeros = x.new_zeros((2, channels), dtype=accumulation_type(x.dtype))
        return zeros[0], zeros[1]
    length = _run_length(x, x.shape[:2])
    if length is None:
        mean, invstd = torch.batch_norm_stats(x, eps)
        return mean, invstd
    parts = torch.batch_norm_stats(x.view(1, x.numel() // length, length), eps)
    means, invstds = (t.view(*x.shape[:2], -1).transpose(1, 2).reshape(-1, channels) for t in parts)
    counts = constant(x.device, (length,) * len(means), means.dtype)
    mean, invstd = torch.batch_norm_gather_stats_with_counts(
        means, means, invstds, None, None, 0.0, eps, counts
    )
    return mean, invstd


def _affine(
    x: Tensor,
    channels: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
) -> Tensor:
    """Return (x - mean) * invstd * weight + bias for the block `x`, seen as (N, C, positions).

    `channels` is (N, C). The other tensors have a number for each of the C channels.
    """
    if not x.numel():
        return torch.empty_like(x)
    if _run_length(x, channels) is None:
        block = x.view(*channels, -1) if x.is_contiguous() else x
    else:
        # In this order of dimensions the kernel works element by element, at the speed of memory.
        block = x.view(*channels, -1).permute(2, 1, 0)
    y = torch.batch_norm_elemt(block, weight, bias, mean, invstd, eps)
    # A view could not be changed in place afterwards.
    return y if y.shape == x.shape else y.as_strided_(x.shape, x.stride())


def _sums(
    dy: Tensor, x: Tensor, channels: Sequence[int], mean: Tensor, invstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's sums of dy, of dy * (x - mean) and of dy * (x - mean) * invstd.

    The sums are over each channel, of shape (C,). `dy` has the memory format of `x`; `channels` is
    (N, C) as the kernels see the block.
    """
    n, c = channels
    if not x.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean), torch.zeros_like(mean)
    length = _run_length(x, channels)
    if length is not None:
        runs = 1, x.numel() // length, length
        split = n, c, runs[1] // (n * c)
        dy, x, mean = dy.view(runs), x.view(runs), mean.view(1, c, 1).expand(split).reshape(-1)
    elif x.is_contiguous():
        dy, x = dy.view(n, c, -1), x.view(n, c, -1)
    if length is not None:
        # Only the third sum, which is not requested, depends on the argument after the mean.
        parts = torch.batch_norm_backward_reduce(dy, x, mean, mean, None, True, False, False)
        sum_dy, sum_dy_xmu = torch.stack(parts[:2]).view(2, *split).sum((1, 3))
        return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd
    # The kernel takes only the type of the third sum from the weight, the fifth argument.
    sum_dy, sum_dy_xmu, of_weight, _ = torch.batch_norm_backward_reduce(
        dy, x, mean, invstd, invstd, True, True, False
    )
    return sum_dy, sum_dy_xmu, of_weight


def _combined(
    mean: Tensor,
    invstd: Tensor,
    norm: Norm,
    grid: Grid,
    running: RunningStatistics | None,
) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / sqrt(variance + eps) over ranks, and update running statistics.

    The results are over all ranks along `norm.group`, and have one dimension. `mean` and `invstd`
    are those of this rank's block, of any shape, also expanded. Collective.
    """
    _, group, counts, eps = norm
    in_kernel = group and running and not running.rest and running.mean.dtype == mean.dtype
    if group and any(counts):
        parts = all_gather(torch.stack([mean, invstd]), grid, group).flatten(2)
        filled = tuple(i for i, n in enumerate(counts) if n)
        if len(filled) < len(counts):
            parts = parts.index_select(0, constant(parts.device, filled))
        means, invstds = parts.unbind(1)
        kept = running if running and in_kernel else None
        numbers = constant(parts.device, tuple(counts[i] for i in filled), parts.dtype)
        # The kernel uses only the type of its first argument.
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            means,
            means,
            invstds,
            kept and kept.mean,
            kept and kept.variance,
            kept.momentum if kept else 0.0,
            eps,
            numbers,
        )
    if running and in_kernel:
        if running.publish is not None:
            running.publish()
    elif running:
        running.update(mean, invstd.square().reciprocal_().sub_(eps))
    return mean.reshape(-1), invstd.reshape(-1)
