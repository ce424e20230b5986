"""Batch norm and group norm on accelerators, by torch's kernels for synchronised batch norm.

torch.nn.SyncBatchNorm is made of these kernels. Each does in one launch what takes several
operators elsewhere: the statistics of a block, their combination over the ranks with the update of
the running statistics, the normalisation, and the sums and the input gradient of the backward pass.
A launch takes the host 5 to 10 us, which decides the speed of small blocks. All arguments are
contiguous, as some of the kernels read memory without regard to strides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distconv.comm.collectives import all_gather, all_reduce_
from distconv.comm.shard_function import ShardFunction
from distconv.grid.interface import Grid
from distconv.ops.norm.form import Form, in_format_of
from distconv.ops.norm.gradients import recorded_gradients
from distconv.ops.norm.running import RunningStatistics
from distconv.ops.support.constants import constant
from distconv.ops.support.operands import accumulation_type, in_type


class SynchronizedBatchNorm(ShardFunction):
    """Normalise the channels of a block (N, C, *spatial) by statistics over several ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        form: Form,
        grid: Grid,
        group: tuple[str, ...],
        counts: tuple[int, ...],
        eps: float,
        running: RunningStatistics | None,
    ) -> Tensor:
        own = _own_statistics(x, form.groups, eps)
        mean, invstd = _combined(*own, grid, group, counts, eps, running)
        ctx.save_for_backward(x, weight, mean, invstd)
        ctx.context = form, grid, group, counts, eps, None if bias is None else bias.dtype
        if not x.numel():
            return torch.empty_like(x)
        return torch.batch_norm_elemt(
            x, _as(weight, mean.dtype), _as(bias, mean.dtype), mean, invstd, eps
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd = ctx.saved_tensors
        form, grid, group, counts, eps, bias = ctx.context
        count = sum(counts)
        if torch.is_grad_enabled():
            made = recorded_gradients(grads[0], x, weight, form, grid, group, max(count, 1), eps)
            return _gradients(*made, weight, bias)
        dy, gain = in_format_of(grads[0], x), _as(weight, mean.dtype)
        if x.numel():
            wanted = weight is not None, weight is not None
            sums = torch.batch_norm_backward_reduce(dy, x, mean, invstd, gain, True, *wanted)
            sum_dy, sum_dy_xmu, dweight, _ = sums
        else:
            sum_dy, sum_dy_xmu, dweight = torch.zeros_like(mean).expand(3, -1).unbind()
        dbias, total = sum_dy, torch.stack([sum_dy, sum_dy_xmu])
        all_reduce_(total, grid, group)
        dx = torch.empty_like(x)
        if x.numel():
            numbers = constant(x.device, counts, torch.int32)
            sum_dy, sum_dy_xmu = total
            dx = torch.batch_norm_backward_elemt(
                dy, x, mean, invstd, gain, sum_dy, sum_dy_xmu, numbers
            )
        return _gradients(dx, dweight, dbias, weight, bias)


class SynchronizedGroupNorm(ShardFunction):
    """Normalise each sample and group of channels of a contiguous block (N, C, *spatial).

    Statistics are over several ranks, each with the same channels. Samples and channels together
    are the channels of torch's kernels.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        form: Form,
        grid: Grid,
        group: tuple[str, ...],
        counts: tuple[int, ...],
        eps: float,
        running: None,
    ) -> Tensor:
        n, c = x.shape[:2]
        groups = n * form.groups
        own = _own_statistics(x.view(1, groups, x.numel() // max(groups, 1)), groups, eps)
        # Each channel gets the numbers of its group.
        mean, invstd = (t.unsqueeze(1).expand(groups, c // max(form.groups, 1)) for t in own)
        mean, invstd = _combined(mean, invstd, grid, group, counts, eps, None)
        ctx.save_for_backward(x, weight, mean, invstd)
        ctx.context = form, grid, group, counts, eps, None if bias is None else bias.dtype
        if not x.numel():
            return torch.empty_like(x)
        gain, shift = (
            None if p is None else in_type(p, mean.dtype).expand(n, c).reshape(-1)
            for p in (weight, bias)
        )
        y = torch.batch_norm_elemt(x.view(1, n * c, -1), gain, shift, mean, invstd, eps)
        return y.as_strided_(x.shape, x.stride())  # a view could not be changed in place afterwards

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd = ctx.saved_tensors
        form, grid, group, counts, eps, bias = ctx.context
        count = max(sum(counts), 1)
        if torch.is_grad_enabled():
            made = recorded_gradients(grads[0], x, weight, form, grid, group, count, eps)
            return _gradients(*made, weight, bias)
        n, c = x.shape[:2]
        split = n, form.groups, c // max(form.groups, 1)
        dy = grads[0].contiguous()
        gain = invstd if weight is None else invstd.view(n, c) * in_type(weight, mean.dtype)
        gain = gain.view(-1)
        if x.numel():
            flat = 1, n * c, x.numel() // (n * c)
            *_, dweight, dbias = torch.batch_norm_backward_reduce(
                dy.view(flat), x.view(flat), mean, invstd, gain, False, True, True
            )
        else:
            dweight = dbias = torch.zeros_like(mean)
        sums = torch.stack([dweight, dbias]).view(2, *split)
        zero = constant(x.device, (0,), mean.dtype)
        total = torch.addcmul(zero, sums, gain.view(split), value=-1 / count).sum(3, keepdim=True)
        all_reduce_(total, grid, group)
        # dx = gain * dy - mean(gain * dy) - standardised x * mean(gain * dy * standardised x)
        dx = torch.empty_like(x)
        if x.numel():
            slope, offset = total.expand(sums.shape).reshape(2, -1)
            dx = torch.batch_norm_elemt(x.view(flat), slope, offset, mean, invstd, eps)
            dx = dx.addcmul_(dy.view(flat), gain.view(1, -1, 1)).view(x.shape)
        dweight, dbias = (sums.squeeze(1) if n == 1 else sums.sum(1)).flatten(1)
        return _gradients(dx, dweight, dbias, weight, bias)


def _own_statistics(x: Tensor, channels: int, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / sqrt(variance + eps) of this rank's elements of each channel."""
    if x.numel():
        mean, invstd = torch.batch_norm_stats(x, eps)
        return mean, invstd
    zeros = x.new_zeros((2, channels), dtype=accumulation_type(x.dtype))
    return zeros[0], zeros[1]


def _combined(
    mean: Tensor,
    invstd: Tensor,
    grid: Grid,
    group: tuple[str, ...],
    counts: tuple[int, ...],
    eps: float,
    running: RunningStatistics | None,
) -> tuple[Tensor, Tensor]:
    """Return the statistics over all ranks along `group`, flat, and update running statistics.

    Collective. `mean` and `invstd` are this rank's; they may be expanded.
    """
    in_kernel = group and running and not running.rest and running.mean.dtype == mean.dtype
    if group and any(counts):
        parts = all_gather(torch.stack([mean, invstd]), grid, group).flatten(2)
        filled = tuple(i for i, n in enumerate(counts) if n)
        if len(filled) < len(counts):
            parts = parts.index_select(0, constant(parts.device, filled))
        means, invstds = parts.unbind(1)
        kept = running if running and in_kernel else None
        numbers = constant(parts.device, tuple(counts[i] for i in filled), parts.dtype)
        # The first argument only gives its type.
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
        running.publish()
    elif running:
        running.update(mean, invstd.square().reciprocal_().sub_(eps))
    return mean.reshape(-1), invstd.reshape(-1)


def _as(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a parameter in the type of the statistics, contiguous."""
    return None if parameter is None else in_type(parameter, dtype).contiguous()


def _gradients(
    dx: Tensor, dweight: Tensor, dbias: Tensor, weight: Tensor | None, bias: torch.dtype | None
) -> tuple[Tensor | None, ...]:
    """Return the results of `backward`; `bias` is the type of the bias, or None."""
    return (
        dx,
        None if weight is None else in_type(dweight, weight.dtype),
        None if bias is None else in_type(dbias, bias),
        *(None,) * 6,
    )
