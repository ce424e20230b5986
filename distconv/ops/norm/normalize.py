"""Normalisation of blocks by statistics over dimensions and ranks: one function for all norms.

`normalize` saves the input, and a mean and a scale for each statistic. Forward, statistics travel
in one message; backward, the sums of gradients do. In between torch's kernels for batch
normalisation run on the block, in its memory format. These kernels take a tensor (N, C, *spatial)
with numbers for each channel; if each sample is normalised alone, the channels are the N * C
channels of one sample.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from distconv.comm.collectives import all_reduce_, all_reduce_with_grad
from distconv.comm.packing import has_channels_last
from distconv.comm.shard_function import ShardFunction
from distconv.grid.interface import Grid
from distconv.ops.norm.form import Form, channels_of, in_format_of, rows_if_small, runs_of
from distconv.ops.norm.moments import moments
from distconv.ops.support.constants import remembered
from distconv.ops.support.operands import (
    accumulation_type,
    check_same_types,
    in_type,
    to_accumulation_type,
)
from distconv.tensor.dist_tensor import DistTensor


def check_parameter_types(name: str, x: DistTensor, *parameters: Tensor | None) -> None:
    """Raise on every rank if types differ; float32 parameters may go with half inputs.

    `name` is the name of the norm, for the error.
    """
    half = accumulation_type(x.dtype) != x.dtype
    if not (half and all(p is None or p.dtype == torch.float32 for p in parameters)):
        check_same_types(name, x, *parameters)


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    form: Form,
    grid: Grid,
    group: tuple[str, ...],
    counts: tuple[int, ...],
    eps: float,
    update: Callable[[Tensor, Tensor], None] | None = None,
) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias for the block `x`.

    The ranks along `group`, over which statistics are taken, call it.

    Parameters
    ----------
    weight, bias: this rank's numbers, one for each channel or for each spatial position.
    counts: the number of elements of a statistic on each rank along `group`.
    update: called with mean and variance, (samples, groups), in `accumulation_type`: float32 for
        half types.
    """
    if grid.computes_on_gpu:
        form = form._replace(in_runs=False)
    y: Tensor = _NormalizeBlock.apply(
        in_format_of(x, x), weight, bias, form, grid, group, counts, eps, update
    )
    return y


class _NormalizeBlock(ShardFunction):
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
        update: Callable[[Tensor, Tensor], None] | None,
    ) -> Tensor:
        mean, variance = moments(x, form, grid, group, counts)
        if update is not None:
            # Before anything is saved: a checkpoint stops recomputation at that point.
            update(mean, variance)
        if not form.centered:
            variance, mean = variance + mean.square(), torch.zeros_like(mean)
        scale = torch.rsqrt(variance + eps)
        gain = scale.unsqueeze(2)
        if weight is not None and not form.weighs_elements:
            gain = gain * _of_groups(weight, scale)
        ctx.save_for_backward(x, weight, mean, scale, gain)
        of_bias = None if bias is None else (bias.dtype, bias.shape)
        ctx.context = form, grid, group, counts, eps, of_bias
        if not form.weighs_elements:
            own = None if bias is None else _of_groups(bias, scale)
            return _affine(x, mean, gain, own, form)
        y = _affine(x, mean, gain, None, form)
        y = y if weight is None else y * weight.reshape(-1)
        y = y if bias is None else y.add_(bias.reshape(-1))
        return in_type(y, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale, gain = ctx.saved_tensors
        form, grid, group, counts, eps, bias = ctx.context
        count = max(sum(counts), 1)
        dy = grads[0]
        dweight: Tensor | None = None
        dbias: Tensor | None = None
        if torch.is_grad_enabled():
            dx, dweight, dbias = _recorded_gradients(dy, x, weight, form, grid, group, count, eps)
        elif form.weighs_elements:
            rows = 1, x.shape[1], prod(x.shape[2:])
            dbias = None if bias is None else dy.view(rows).sum((0, 1))
            if weight is not None:
                dweight = (dy * _affine(x, mean, gain, None, form)).view(rows).sum((0, 1))
                dy = in_type(dy * weight.reshape(-1), x.dtype)
            dx, _, _ = _gradients(dy, x, mean, scale, gain, form, grid, group, count)
        else:
            dx, dweight, dbias = _gradients(dy, x, mean, scale, gain, form, grid, group, count)
        return (
            dx,
            None
            if dweight is None or weight is None
            else in_type(dweight, weight.dtype).view(weight.shape),
            None if dbias is None or bias is None else in_type(dbias, bias[0]).view(bias[1]),
            *(None,) * 6,
        )


def _gradients(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    scale: Tensor,
    gain: Tensor,
    form: Form,
    grid: Grid,
    group: tuple[str, ...],
    count: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias; the last two have a number for each channel.

    dx = gain * dy - scale * (mean(gain * dy) + standardised x * mean(gain * dy * standardised x)),
    with means over the `count` elements of a statistic, scale = 1 / sqrt(variance + eps), and gain
    = weight * scale.
    """
    dy = in_format_of(dy, x)
    sums = _sums(dy, x, mean, form)
    sums[0].mul_(scale.unsqueeze(2))
    total = (sums * gain).sum(3, keepdim=True)
    if group:
        all_reduce_(total, grid, group)
    slope, offset = total.div_(-count).unbind()
    slope = slope * scale.unsqueeze(2)
    dx = _affine(x, mean, slope, offset if form.centered else None, form)
    if x.numel():
        runs = channels_of(x, form)
        runs.of(dx).addcmul_(runs.of(dy), runs.spread(gain))
    of_weight, of_bias = sums.sum(1).flatten(1).unbind()
    return dx, of_weight, of_bias


def _recorded_gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    form: Form,
    grid: Grid,
    group: tuple[str, ...],
    count: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `_gradients`, recorded for differentiation to any order."""
    groups, channels = form.groups, x.shape[1] // max(form.groups, 1)
    shape = x.shape[0], groups, channels, prod(x.shape[2:])
    over = (2, 3) if form.of_each_sample else (0, 2, 3)
    of_weight = (0, 1, 2) if form.weighs_elements else (0, 3)
    dy, deviation = (to_accumulation_type(t).reshape(shape) for t in (dy, x))

    def mean(t: Tensor) -> Tensor:
        return all_reduce_with_grad(t.sum(over, keepdim=True), grid, group) / count

    if form.centered:
        deviation = deviation - mean(deviation)
    scale = torch.rsqrt(mean(deviation.square()) + eps)
    standard = deviation * scale
    dweight, dbias = (dy * standard).sum(of_weight), dy.sum(of_weight)
    if weight is not None:
        own = (1, 1, 1, -1) if form.weighs_elements else (1, groups, channels, 1)
        dy = dy * in_type(weight, dy.dtype).reshape(own)
    dx = dy - standard * mean(dy * standard)
    if form.centered:
        dx = dx - mean(dy)
    return in_type((dx * scale).view(x.shape), x.dtype), dweight, dbias


def _of_groups(parameter: Tensor, scale: Tensor) -> Tensor:
    """Return a weight or bias as (groups, channels of a group), with the type of `scale`."""
    groups = scale.shape[1]
    shape = groups, parameter.numel() // max(groups, 1) or 1
    return in_type(parameter, scale.dtype).reshape(shape)


def _affine(x: Tensor, mean: Tensor, gain: Tensor, bias: Tensor | None, form: Form) -> Tensor:
    """Return (x - mean) * gain + bias for a block `x`, as one fused multiply-add per element.

    `mean` is (samples, groups); `gain` and `bias` are (samples, groups, channels of a group), or
    broadcast to it.
    """
    if not x.numel():
        return torch.empty_like(x)
    runs = channels_of(x, form)
    zero = mean.new_zeros(()) if bias is None else bias
    shift = torch.addcmul(zero, mean.unsqueeze(2), gain, value=-1)
    gain, shift = runs.spread(gain), runs.spread(shift)
    many = x.numel() >= _MANY_ELEMENTS and x.shape[1] >= _MANY_CHANNELS
    if runs.matrices or (many and has_channels_last(x)):
        y = in_type(torch.addcmul(shift, runs.of(x), gain), x.dtype)
    else:
        zeros, ones = _numbers(x.device, gain.numel(), mean.dtype)
        own = gain.flatten(), shift.flatten(), zeros, ones
        y, _, _ = torch.native_batch_norm(runs.of(x), *own, False, 0.0, 0.0)
    # A view could not be changed in place afterwards.
    return y if y.shape == x.shape else y.as_strided_(x.shape, x.stride())


_MANY_CHANNELS = 16
_MANY_ELEMENTS = 2**17
"""Channels and elements above which `addcmul` normalises a block with channels last faster than
torch's batch norm: measured 0.8 of its time, and 0.65 with twice as many elements."""


@remembered
def _numbers(device: torch.device, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return n zeros and n ones."""
    with torch.inference_mode(False):
        return torch.zeros(n, dtype=dtype, device=device), torch.ones(n, dtype=dtype, device=device)


def _sums(dy: Tensor, x: Tensor, mean: Tensor, form: Form) -> Tensor:
    """Return the sums of dy * (x - mean) and of dy over the rank's elements.

    Their shape is (2, samples, groups, channels of a group).
    """
    if not x.numel():
        return mean.new_zeros((2, *mean.shape, x.shape[1] // max(form.groups, 1)))
    dy, x = (rows_if_small(t, form) for t in (dy, x))
    runs = runs_of(x, form)
    centers = runs.spread(mean.unsqueeze(2))
    _, ones = _numbers(x.device, runs.shape[2 if runs.matrices else 1], mean.dtype)
    calls = runs.calls(dy), runs.calls(x), centers.unbind() if runs.matrices else (centers,)
    kernel = torch.ops.aten.native_batch_norm_backward
    parts = []
    for own_dy, own_x, center in zip(*calls, strict=True):
        own = center.flatten()
        _, *sums = kernel(own_dy, own_x, own, own, ones, own, ones, False, 0.0, [False, True, True])
        parts.append(sums)
    return runs.collect(parts).sum((2, 5))
