"""Normalisation of blocks by statistics over dimensions and ranks: one function for all norms.

What it saves is the input, and a mean and a scale for each statistic. Forward, statistics travel in
one message, backward the sums of gradients. In between torch's kernels for batch normalisation run
on the block, in its memory format. A tensor is to them one of channels, (N, C, *spatial), of which
each has numbers of its own; where each sample is normalised alone these are the N * C channels of
one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distconv.comm.collectives import all_reduce_, all_reduce_with_grad
from distconv.comm.packing import CHANNELS_LAST, has_channels_last
from distconv.comm.shard_function import ShardFunction
from distconv.grid.interface import Grid
from distconv.ops.norm.moments import moments
from distconv.ops.support.constants import remembered
from distconv.ops.support.types import (
    accumulation_type,
    check_same_types,
    in_type,
    to_accumulation_type,
)
from distconv.tensor.dist_tensor import DistTensor


class Form(NamedTuple):
    """The dimensions of a block (N, C, *spatial) over which statistics are taken.

    Attributes
    ----------
    groups: into how many groups the channels are divided.
    of_each_sample: whether each sample has statistics of its own.
    centered: whether the mean is subtracted; otherwise deviations are from 0.
    weighs_elements: whether weight and bias have a number for each spatial position, not for each
        channel.
    """

    groups: int
    of_each_sample: bool
    centered: bool = True
    weighs_elements: bool = False

    def rows(self, x: Tensor) -> tuple[int, int, int]:
        """Return samples, groups, and channels of a group, of what has numbers of its own."""
        samples = x.shape[0] if self.of_each_sample else 1
        return samples, self.groups, x.shape[1] // self.groups if self.groups else 1

    def channels(self, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Return `x` as torch's kernels take it, and the dimensions that statistics are over."""
        if not self.of_each_sample:
            return x, (0, *range(2, x.dim()))
        if has_channels_last(x):
            return x, tuple(range(2, x.dim()))
        return x.view(1, x.shape[0] * x.shape[1], prod(x.shape[2:])), (0, 2)


def check_parameter_types(name: str, x: DistTensor, *parameters: Tensor | None) -> None:
    """Raise on every rank for types that differ, but for float32 parameters of half inputs."""
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

    The ranks along `group` call it, over which statistics are taken.

    Parameters
    ----------
    weight, bias: this rank's part, a number for each channel or for each spatial position.
    counts: the elements that a statistic takes on each of these ranks.
    update: is given mean and variance, (samples, groups) in float64.
    """
    y: Tensor = _Normalize.apply(
        _in_format_of(x, x), weight, bias, form, grid, group, counts, eps, update
    )
    return y


class _Normalize(ShardFunction):
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
        mean, variance = moments(*form.channels(x), form.rows(x), grid, group, counts)
        if update is not None:
            # Before anything is saved: there a checkpoint stops to compute again.
            update(mean, variance)
        if not form.centered:
            variance, mean = variance + mean.square(), torch.zeros_like(mean)
        scale = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, scale)
        of_bias = None if bias is None else (bias.dtype, bias.shape)
        ctx.context = form, grid, group, counts, eps, of_bias
        if not form.weighs_elements:
            return _weighed(x, weight, bias, mean, scale, form)
        y = _weighed(x, None, None, mean, scale, form)
        y = y if weight is None else y * weight.reshape(-1)
        y = y if bias is None else y + bias.reshape(-1)
        return in_type(y, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        form, grid, group, counts, eps, bias = ctx.context
        count = max(sum(counts), 1)
        dy = grads[0]
        if torch.is_grad_enabled():
            dx, dweight, dbias = _recorded_gradients(dy, x, weight, form, grid, group, count, eps)
        elif form.weighs_elements:
            standard = _weighed(x, None, None, mean, scale, form)
            rows = 1, x.shape[1], prod(x.shape[2:])
            dweight, dbias = (t.view(rows).sum((0, 1)) for t in (dy * standard, dy))
            dy = dy if weight is None else in_type(dy * weight.reshape(-1), x.dtype)
            dx, _, _ = _gradients(dy, x, None, mean, scale, form, grid, group, count)
        else:
            dx, dweight, dbias = _gradients(dy, x, weight, mean, scale, form, grid, group, count)
        return (
            dx,
            None if weight is None else in_type(dweight, weight.dtype).view(weight.shape),
            None if bias is None else in_type(dbias, bias[0]).view(bias[1]),
            *(None,) * 6,
        )


def _gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    scale: Tensor,
    form: Form,
    grid: Grid,
    group: tuple[str, ...],
    count: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias, a number for each channel of the latter.

    dx = scale * (dy * weight - mean(dy * weight) - standardised x * mean(dy * weight *
    standardised x)), of which the means are over the `count` elements of a statistic.
    """
    dy = _in_format_of(dy, x)
    sums = _sums(dy, x, mean, form)
    sums[0] *= scale.unsqueeze(2)
    gain = _gain(scale, weight)
    total = (sums * gain).sum(3)
    if group:
        all_reduce_(total, grid, group)
    of_standard, of_gradient = total.div_(-count).unbind()
    slope = of_standard * scale
    # Without a mean that is subtracted, the saved one is 0.
    offset = of_gradient - slope * mean if form.centered else torch.zeros_like(slope)
    dx = _affine(x, slope.unsqueeze(2), offset.unsqueeze(2), form)
    if x.numel():
        v, _ = form.channels(dx)
        v.addcmul_(form.channels(dy)[0], _by_channel(gain, x, form))
    of_weight, of_bias = sums.sum(1).flatten(1)
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
    """Return the same gradients by functions that can be differentiated, to any order."""
    samples, groups, channels = form.rows(x)
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


def _gain(scale: Tensor, weight: Tensor | None) -> Tensor:
    """Return scale times weight, for samples, groups, and channels of a group."""
    scale = scale.unsqueeze(2)
    return scale if weight is None else scale * _of_groups(weight, scale)


def _of_groups(parameter: Tensor, like: Tensor) -> Tensor:
    """Return a weight or bias as (groups, channels of a group), with the groups of `like`."""
    groups = like.shape[1]
    return parameter.reshape(groups, parameter.numel() // max(groups, 1) or 1)


def _weighed(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    scale: Tensor,
    form: Form,
) -> Tensor:
    """Return (x - mean) * scale * weight + bias."""
    # The shift fits the rounded gain, so that a large mean does not magnify its rounding error.
    gain = in_type(_gain(scale, weight), accumulation_type(x.dtype))
    shift = -mean.unsqueeze(2) * gain
    if bias is not None:
        shift = shift + _of_groups(bias, shift)
    return _affine(x, gain, shift, form)


def _affine(x: Tensor, gain: Tensor, shift: Tensor, form: Form) -> Tensor:
    """Return x * gain + shift, with numbers for samples, groups, and channels of a group."""
    if not x.numel():
        return torch.empty_like(x)
    channels, _ = form.channels(x)
    if has_channels_last(x):
        y = torch.addcmul(_by_channel(shift, x, form), x, _by_channel(gain, x, form))
        return in_type(y, x.dtype)
    gain, shift = (_by_channel(t, x, form).flatten() for t in (gain, shift))
    zeros, ones = _numbers(x.device, len(gain), gain.dtype)
    y, _, _ = torch.native_batch_norm(channels, gain, shift, zeros, ones, False, 0.0, 0.0)
    # A view could not be changed in place afterwards.
    return y.resize_(x.shape)


def _by_channel(numbers: Tensor, x: Tensor, form: Form) -> Tensor:
    """Return numbers of samples, groups and channels as they are broadcast to `form.channels`."""
    channels, _ = form.channels(x)
    own = in_type(numbers, accumulation_type(x.dtype)).expand(form.rows(x))
    return own.reshape(-1, channels.shape[1], *(1,) * (channels.dim() - 2))


@remembered
def _numbers(device: torch.device, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return n zeros, and n ones."""
    with torch.inference_mode(False):
        return torch.zeros(n, dtype=dtype, device=device), torch.ones(n, dtype=dtype, device=device)


_ADDED_UP = 2**18
"""Elements of a block with channels last up to which torch's sums are right to 1e-5: it adds up all
positions one by one in the type of the statistics."""

_FEWEST = 2**13
"""Elements of a sample with channels last from which a call for each of them was measured to be
faster than functions for all."""


def _sums(dy: Tensor, x: Tensor, mean: Tensor, form: Form) -> Tensor:
    """Return the sums of dy * (x - mean) and of dy over the rank's elements, in float64.

    They are (2, samples, groups, channels of a group).
    """
    rows = form.rows(x)
    if not x.numel():
        return mean.new_zeros((2, *rows))
    channels, over = form.channels(x)
    center = _by_channel(mean.unsqueeze(2), x, form)
    of_samples = has_channels_last(x) and form.of_each_sample
    if not has_channels_last(x):
        sums = _sums_of_channels(form.channels(dy)[0], channels, center)
    elif of_samples and (x.is_cuda or x.numel() < _FEWEST * x.shape[0]):
        wide = to_accumulation_type(dy)
        sums = torch.stack([(wide * (x - center)).sum(over), wide.sum(over)])
    elif of_samples:
        parts = zip(dy.split(1), x.split(1), center.split(1), strict=True)
        sums = torch.stack([_sums_of_pieces(*part) for part in parts], 1)
    else:
        sums = _sums_of_pieces(dy, x, center)
    return sums.double().view(2, *rows)


def _sums_of_pieces(dy: Tensor, x: Tensor, center: Tensor) -> Tensor:
    """Return the sums of each channel of a block with channels last."""
    if x.numel() <= _ADDED_UP or x.is_cuda:
        return _sums_of_channels(dy, x, center)
    pieces = zip(_pieces(dy), _pieces(x), strict=True)
    return torch.stack([_sums_of_channels(*piece, center) for piece in pieces]).sum(0)


def _pieces(x: Tensor) -> Iterator[Tensor]:
    """Yield runs of samples, or of rows of one sample, that are small enough to be added up."""
    for some in x.split(max(1, _ADDED_UP * x.shape[0] // x.numel())):
        yield from some.split(max(1, _ADDED_UP * x.shape[2] // some.numel()), 2)


def _sums_of_channels(dy: Tensor, x: Tensor, center: Tensor) -> Tensor:
    """Return the sums of dy * (x - center) and of dy for each channel, by torch's kernel."""
    center = center.flatten()
    _, ones = _numbers(x.device, len(center), center.dtype)
    statistics = center, center, ones, center, ones, False, 0.0, [False, True, True]
    _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(dy, x, *statistics)
    return torch.stack([of_weight, of_bias])


def _in_format_of(x: Tensor, other: Tensor) -> Tensor:
    """Return `x` without gaps, in the memory format of `other`."""
    last = has_channels_last(other)
    form = CHANNELS_LAST[x.dim()] if last else torch.contiguous_format
    return with_batch_stride(x.contiguous(memory_format=form))


def with_batch_stride(x: Tensor) -> Tensor:
    """Return the block in the memory format that torch's kernels take it for.

    The stride of a single sample may be any number, but if it is not that of the format, the
    kernels read a gradient of the other format in the wrong order.
    """
    if not x.numel() or x.shape[0] != 1 or x.is_contiguous() or x.stride(0) == x.numel():
        return x
    return x.as_strided(x.shape, (x.numel(), *x.stride()[1:]))
