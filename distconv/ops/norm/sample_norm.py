"""Normalisations of each sample by itself: group, instance, layer and root-mean-square norm."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.comm.collectives import all_reduce
from distconv.geometry.layout import cutting_axes
from distconv.ops.norm.batch_norm import batch_norm, gather_running_statistics, own_channels
from distconv.ops.norm.moments import Standardize, element_counts_of_peers
from distconv.ops.reduce.sums import mean as mean_of
from distconv.ops.support.metadata_checks import any_type, check_on_meta
from distconv.ops.support.operands import (
    Placement,
    as_distributed,
    common_grid,
    gather_whole,
    local_operand,
    uncut,
)
from distconv.ops.support.types import accumulation_type, check_same_types, to_accumulation_type
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import redistribute


def _affine(
    x: DistTensor, shard: Tensor, weight: Tensor | None, bias: Tensor | None, name: str
) -> DistTensor:
    """Return the block `shard` times weight plus bias, which are broadcast to the tensor `x`."""
    arguments = tuple(x.shape), x.cuts, x.grid, name
    return _scaled(x, shard, *(local_operand(t, *arguments) for t in (weight, bias)))


def _scaled(x: DistTensor, shard: Tensor, weight: Tensor | None, bias: Tensor | None) -> DistTensor:
    """Return `shard` times weight plus bias, with the blocks of both that meet the rank's own."""
    if weight is not None:
        shard = shard * weight
    if bias is not None:
        shard = shard + bias
    return DistTensor(shard.to(x.dtype), x.shape, x.cuts, x.grid)


def _parameter_types(name: str, x: DistTensor, *parameters: Tensor | None) -> None:
    """Raise on every rank for types that differ, but for float32 parameters of half inputs."""
    half = accumulation_type(x.dtype) != x.dtype
    if not (half and all(p is None or p.dtype == torch.float32 for p in parameters)):
        check_same_types(name, x, *parameters)


def _per_channel(statistic: Tensor | None, ndim: int) -> Tensor | None:
    return None if statistic is None else statistic.reshape(-1, *(1,) * (ndim - 2))


@implements(F.group_norm, torch.group_norm)
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> DistTensor:
    """Normalise each sample and group of channels over the whole plane."""
    name = "group_norm"
    x = as_distributed(input, common_grid("group_norm", (input, weight, bias)))
    _parameter_types("group_norm", x, weight, bias)
    check_on_meta(F.group_norm, any_type(x), num_groups, any_type(weight), any_type(bias), eps)
    channels, cuts = x.shape[1] // num_groups, x.cuts
    if num_groups % x.grid.topology.parts(cuts[1]) and channels != 1:
        # Some groups lie on several ranks.
        return redistribute(
            group_norm(uncut(x, [1], name), num_groups, weight, bias, eps), cuts, name
        )
    weight, bias = own_channels(weight, x, name), own_channels(bias, x, name)
    groups = x.shard.shape[1] // max(channels, 1)
    spatial = tuple(range(2, x.dim()))
    group = cutting_axes(cuts[2:])
    if not group and x.shard.numel():
        # torch.nn.functional would look at the size of this block once more.
        shard = torch.group_norm(x.shard, groups, weight, bias, eps)
        return DistTensor(shard, x.shape, cuts, x.grid)
    counts = element_counts_of_peers(Placement.of(x), spatial, group, block=channels)
    grouped = x.shard.unflatten(1, (groups, channels))
    over = tuple(range(2, grouped.dim()))
    shard, _, _ = Standardize.apply(grouped, over, x.grid, group, counts, eps)
    weight, bias = _per_channel(weight, x.dim()), _per_channel(bias, x.dim())
    return _scaled(x, shard.flatten(1, 2), weight, bias)


@implements(torch.instance_norm)
def _instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    return F.instance_norm(
        input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
    )


@implements(F.instance_norm)
def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> DistTensor:
    """Normalise each sample and channel over the whole plane; running statistics on request."""
    x = as_distributed(input, common_grid("instance_norm", (input, weight, bias)))
    _parameter_types("instance_norm", x, weight, bias)
    if not use_input_stats:
        return batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    sizes = [any_type(t) for t in (running_mean, running_var, weight, bias)]
    check_on_meta(F.instance_norm, any_type(x), *sizes, True, momentum)
    if (running_mean is None) != (running_var is None):
        raise ValueError(
            "instance_norm: running_mean and running_var must either both be None or neither"
        )
    elements = prod(x.shape[2:])
    if elements == 1:
        raise ValueError(
            "instance_norm: expected more than 1 spatial element when training, got input size "
            f"{tuple(x.shape)}"
        )
    spatial = tuple(range(2, x.dim()))
    group = cutting_axes(x.cuts[2:])
    counts = element_counts_of_peers(Placement.of(x), spatial, group)
    shard, mean, variance = Standardize.apply(x.shard, spatial, x.grid, group, counts, eps)
    if running_mean is not None and running_var is not None and elements:
        # The running statistics take the mean over the samples.
        unbiased = variance * (elements / (elements - 1))
        sums = torch.stack([mean.flatten(1).sum(0), unbiased.flatten(1).sum(0)])
        axes = cutting_axes(x.cuts[:1])
        total = all_reduce(sums, x.grid, axes) if axes else sums
        running = running_mean, running_var
        own = [own_channels(t, x, "instance_norm") for t in running]
        with torch.no_grad():
            for t, batch in zip(own, total, strict=True):
                assert t is not None
                t.lerp_((batch / x.shape[0]).to(t.dtype), momentum)
        gather_running_statistics(x, running, own, "instance_norm")
    weight, bias = _per_channel(weight, x.dim()), _per_channel(bias, x.dim())
    return _affine(x, shard, weight, bias, "instance_norm")


@implements(F.layer_norm, torch.layer_norm)
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> DistTensor:
    """Normalise each sample over the last dimensions, cut or not."""
    x = as_distributed(input, common_grid("layer_norm", (input, weight, bias)))
    _parameter_types("layer_norm", x, weight, bias)
    weight, bias = gather_whole(weight, "layer_norm"), gather_whole(bias, "layer_norm")
    check_on_meta(
        F.layer_norm, any_type(x), tuple(normalized_shape), any_type(weight), any_type(bias), eps
    )
    over = tuple(range(x.dim() - len(normalized_shape), x.dim()))
    group = cutting_axes(x.cuts[d] for d in over)
    if not group and x.shard.numel():
        shard = F.layer_norm(x.shard, tuple(normalized_shape), weight, bias, eps)
        return DistTensor(shard, x.shape, x.cuts, x.grid)
    counts = element_counts_of_peers(Placement.of(x), over, group)
    shard, _, _ = Standardize.apply(x.shard, over, x.grid, group, counts, eps)
    return _affine(x, shard, weight, bias, "layer_norm")


@implements(F.rms_norm, torch.rms_norm)
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> DistTensor:
    """Divide by the root of the mean square over the last dimensions, cut or not."""
    x = as_distributed(input, common_grid("rms_norm", (input, weight)))
    check_on_meta(F.rms_norm, any_type(x), tuple(normalized_shape), any_type(weight), eps)
    over = list(range(x.dim() - len(normalized_shape), x.dim()))
    wide: Any = DistTensor(to_accumulation_type(x.shard), x.shape, x.cuts, x.grid)
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    scale = torch.rsqrt(mean_of(wide * wide, over, keepdim=True) + eps)
    return _affine(
        x, redistribute(wide * scale, x.cuts, "rms_norm").shard, weight, None, "rms_norm"
    )


@implements(F.local_response_norm)
def local_response_norm(
    input: DistTensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> DistTensor:
    """Divide by a power of the mean square over neighbouring channels."""
    check_on_meta(F.local_response_norm, any_type(input), size, alpha, beta, k)
    x = uncut(input, [1], "local_response_norm")
    if x.shard.numel():
        shard = F.local_response_norm(x.shard, size, alpha, beta, k)
    else:
        # torch has integers divided, unless there are none.
        shard = x.shard / 1 if x.numel() else x.shard.clone()
    y = DistTensor(shard, x.shape, x.cuts, x.grid)
    return redistribute(y, input.cuts, "local_response_norm")
