"""Normalisation of a block by statistics over dimensions and ranks: one function for all norms.

`normalize` saves the input and its means and variances for backward. The forward pass exchanges
statistics in one collective, the backward pass sums of gradients. Before and after it, torch's
kernels for batch normalisation run on the block, in its memory format: on accelerators kernels for
synchronised batch norm (`synchronized.py`), otherwise the kernels in this file. All kernels take a
tensor (N, C, *spatial), with one mean and variance for each channel. If each sample is normalised
by its own statistics, the kernels see one sample of N * C channels.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from distconv.comm.collectives import all_reduce_
from distconv.comm.packing import CHANNELS_LAST, filled, has_channels_last
from distconv.grid.interface import Grid
from distconv.ops.norm.statistics import (
    Norm,
    RunningStatistics,
    by_groups,
    channels_of,
    in_format_of,
    moments,
    recorded_gradients,
    rows_if_small,
    runs_of,
)
from distconv.ops.norm.synchronized import SynchronizedNorm
from distconv.ops.support.operands import (
    accumulation_type,
    check_same_types,
    constant,
    in_type,
)
from distconv.tensor.dist_tensor import DistTensor
from distconv.torch_private import ShardFunction


def check_parameter_types(name: str, x: DistTensor, *parameters: Tensor | None) -> None:
    """Raise on every rank if `parameters` have another type than the input `x`.

    Inputs in half precision may have float32 parameters. `name` is the name of the norm, for the
    error.
    """
    half = accumulation_type(x.dtype) != x.dtype
    if not (half and all(p is None or p.dtype == torch.float32 for p in parameters)):
        check_same_types(name, x, *parameters)


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    grid: Grid,
    running: RunningStatistics | None = None,
) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias for this rank's block `x`.

    Collective over the ranks along `norm.group`, over which mean and variance are taken.

    Parameters
    ----------
    x: a block of shape (N, C, *spatial).
    weight, bias: this rank's blocks, with a number for each channel or each spatial position.
    norm: the elements and ranks of the statistics, and `eps`.
    running: the running statistics to update, if any.
    """
    form, x = norm.form, in_format_of(x, x)
    # All ranks choose the same, as the functions exchange different messages.
    synchronized = (
        grid.computes_on_gpu and form.centered and not (form.weighs_elements or x.is_meta)
    )
    last = synchronized and form.of_each_sample and has_channels_last(x)
    block = x.contiguous() if last else x
    args = block, weight, bias, norm, grid, running
    y: Tensor = (
        SynchronizedNorm.apply(*args)
        if synchronized
        else _NormalizeBlock.apply(*args, None if norm.group else _zero_of(weight, bias))
    )
    return y.contiguous(memory_format=CHANNELS_LAST[y.dim()]) if last else y


def _zero_of(weight: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Return a 0 that depends on weight and bias in the autograd graph, or None if neither can.

    Where ranks exchange no statistics, each rank chooses between torch's group norm and
    `normalize` by the memory format of its block. The gradients of torch's group norm depend on
    weight and bias in the graph. This 0 makes the gradients of `normalize` depend on both, too. So
    all ranks run the same exchanges when gradients are differentiated again.
    """
    sums = [p.reshape(-1)[:0].sum() for p in (weight, bias) if p is not None and p.requires_grad]
    return sum(sums[1:], sums[0]) if sums and torch.is_grad_enabled() else None


class _NormalizeBlock(ShardFunction):
    """An autograd function of `normalize` on CPUs, and for all norms without a GPU kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        norm: Norm,
        grid: Grid,
        running: RunningStatistics | None,
        zero: Tensor | None,
    ) -> Tensor:
        mean, variance = moments(x, norm, grid)
        if running is not None:
            # Before tensors are saved, as a checkpoint stops recomputation there.
            running.update(mean, variance)
        if not norm.form.centered:
            variance, mean = variance + mean.square(), torch.zeros_like(mean)
        ctx.save_for_backward(x, weight, mean, variance, zero)
        of_bias = None if bias is None else (bias.dtype, bias.shape)
        ctx.context = norm, grid, of_bias
        if not norm.form.weighs_elements:
            return _affine(
                x, mean, variance, _by_groups(weight, mean), _by_groups(bias, mean), norm
            )
        y = _affine(x, mean, variance, None, None, norm)
        y = y if weight is None else y * weight.reshape(-1)
        y = y if bias is None else y.add_(bias.reshape(-1))
        return in_type(y, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance, zero = ctx.saved_tensors
        (norm, grid, bias), dy = ctx.context, grads[0]
        dweight: Tensor | None = None
        dbias: Tensor | None = None
        if torch.is_grad_enabled():
            dx, dweight, dbias = recorded_gradients(dy, x, weight, norm, grid)
            if zero is not None:
                dx, dweight = dx + in_type(zero, dx.dtype), dweight + zero
        elif norm.form.weighs_elements:
            rows = 1, x.shape[1], prod(x.shape[2:])
            dbias = None if bias is None else dy.view(rows).sum((0, 1))
            if weight is not None:
                standard = _affine(x, mean, variance, None, None, norm)
                dweight = (dy * standard).view(rows).sum((0, 1))
                dy = in_type(dy * weight.reshape(-1), x.dtype)
            dx, _, _ = _gradients(dy, x, None, mean, variance, norm, grid)
        else:
            dx, dweight, dbias = _gradients(
                dy, x, _by_groups(weight, mean), mean, variance, norm, grid
            )
        return (
            dx,
            None
            if dweight is None or weight is None
            else in_type(dweight, weight.dtype).view(weight.shape),
            None if dbias is None or bias is None else in_type(dbias, bias[0]).view(bias[1]),
            *(None,) * 4,
        )


def _gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    norm: Norm,
    grid: Grid,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias for the gradient `dy` of a norm's output.

    dx = gain * dy - mean(gain * dy) - standardised x * mean(gain * dy * standardised x), with means
    over the elements of a statistic, and gain = weight / sqrt(variance + eps). `weight` has shape
    (1, groups, channels of a group). The gradients of weight and bias have shape (channels,), and
    are sums over this rank's elements. Collective over the ranks along `norm.group`.
    """
    dy = in_format_of(dy, x)
    gain = _gain(weight, variance, norm.eps)
    sums = _sums(dy, x, mean, variance, norm)
    zero = constant(x.device, (0,), gain.dtype)
    total = torch.addcmul(zero, sums, gain, value=-1 / max(sum(norm.counts), 1))
    if total.shape[3] != 1:
        total = total.sum(3, keepdim=True)
    if norm.group:
        all_reduce_(total, grid, norm.group)
    slope, offset = total.unbind()
    dx = _affine(x, mean, variance, slope, offset if norm.form.centered else None, norm)
    if x.numel():
        runs = channels_of(x, norm.form)
        runs.of(dx).addcmul_(runs.of(dy), runs.spread(gain))
    of_samples = sums.squeeze(1) if sums.shape[1] == 1 else sums.sum(1)
    of_weight, of_bias = of_samples.flatten(1).unbind()
    return dx, of_weight, of_bias


def _by_groups(parameter: Tensor | None, mean: Tensor) -> Tensor | None:
    """Return a weight or bias in the shape (1, groups, channels of a group), or None for None.

    `mean`, of shape (samples, groups), gives the number of groups and the type.
    """
    if parameter is None:
        return None
    groups = mean.shape[1]
    shape = 1, groups, parameter.numel() // max(groups, 1) or 1
    return in_type(parameter, mean.dtype).reshape(shape)


def _gain(weight: Tensor | None, variance: Tensor, eps: float) -> Tensor:
    """Return weight / sqrt(variance + eps), of shape (samples, groups, channels of a group or 1).

    `weight` has shape (1 or samples, groups, channels of a group), or is None for 1. `variance` has
    shape (samples, groups).
    """
    device, dtype, n = variance.device, variance.dtype, variance.numel()
    if not n:
        return variance.unsqueeze(2)
    weight = filled(device, (1,), 1.0, dtype) if weight is None else weight
    rows = weight.expand(*variance.shape, weight.shape[-1]).reshape(1, n, -1)
    # One kernel instead of a sum, a root and a product.
    numbers = None, None, filled(device, (n,), 0.0, dtype), variance.flatten()
    gain, _, _ = torch.native_batch_norm(rows, *numbers, False, 0.0, eps)
    return gain.view(*variance.shape, -1)


def _affine(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias for this rank's block `x`.

    `mean` and `variance` have shape (samples, groups). `weight` and `bias` broadcast to (samples,
    groups, channels of a group).
    """
    if not x.numel():
        return torch.empty_like(x)
    form, eps = norm.form, norm.eps
    whole_groups = weight is None or weight.shape[2] == 1
    block = by_groups(x, form) if whole_groups else x
    runs = channels_of(block, form)
    many = form.in_runs and x.numel() >= _MANY_ELEMENTS and x.shape[1] >= _MANY_CHANNELS
    if runs.matrices or (many and has_channels_last(x)):
        gain = _gain(weight, variance, eps)
        zero = constant(x.device, (0,), gain.dtype) if bias is None else bias
        shift = torch.addcmul(zero, mean.unsqueeze(2), gain, value=-1)
        scaled = torch.addcmul(runs.spread(shift), runs.of(block), runs.spread(gain))
        y = in_type(scaled, x.dtype)
    else:
        numbers = weight, bias, mean.unsqueeze(2), variance.unsqueeze(2)
        # Kernels for channels last ignore the strides of weight, bias, mean and variance.
        w, b, m, v = [t if t is None else runs.spread(t).flatten().contiguous() for t in numbers]
        y, _, _ = torch.native_batch_norm(runs.of(block), w, b, m, v, False, 0.0, eps)
    # A view could not be changed in place afterwards.
    return y if y.shape == x.shape else y.as_strided_(x.shape, x.stride())


_MANY_CHANNELS = 16
_MANY_ELEMENTS = 2**17
"""The numbers of channels and elements from which `addcmul` normalises a block in channels last
faster than torch's batch norm: in 0.8 of the time, and in 0.65 with twice the elements."""


def _sums(dy: Tensor, x: Tensor, mean: Tensor, variance: Tensor, norm: Norm) -> Tensor:
    """Return this rank's sums of dy * (x - mean) / sqrt(variance + eps), and of dy.

    The sums are over the block, for each channel or for each sample and channel. The result has
    shape (2, samples, groups, channels of a group).
    """
    if not x.numel():
        return mean.new_zeros((2, *mean.shape, x.shape[1] // max(norm.form.groups, 1)))
    dy, x = (rows_if_small(t, norm.form) for t in (dy, x))
    runs = runs_of(x, norm.form)
    own = [runs.spread(t.unsqueeze(2)) for t in (mean, variance)]
    ones = filled(x.device, (runs.shape[2 if runs.matrices else 1],), 1.0, mean.dtype)
    # Saved mean and inverse deviation without elements, as `native_batch_norm` returns them in
    # evaluation. CUDA's kernel would use saved numbers instead of the running statistics.
    none = filled(x.device, (0,), 1.0, mean.dtype)
    statistics = zip(*(t.unbind() for t in own), strict=True) if runs.matrices else [own]
    kernel = torch.ops.aten.native_batch_norm_backward
    parts = []
    for own_dy, own_x, numbers in zip(runs.calls(dy), runs.calls(x), statistics, strict=True):
        own_mean, own_variance = (t.flatten().contiguous() for t in numbers)
        _, *sums = kernel(
            *(own_dy, own_x, ones, own_mean, own_variance, none, none),
            *(False, norm.eps, [False, True, True]),
        )
        parts.append(sums)
    sums = torch.stack(runs.collect(parts))
    alone = sums.shape[2] == sums.shape[5] == 1
    return sums[:, :, 0, :, :, 0] if alone else sums.sum((2, 5))
