"""Normalisation of each sample and group of channels, or each sample and channel."""

from __future__ import annotations

from functools import partial
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.comm.packing import has_channels_last
from distconv.device.thresholds import on_accelerator, thresholds
from distconv.geometry.layout import cutting_axes
from distconv.ops.norm.batch_norm import own_channels
from distconv.ops.norm.form import Form
from distconv.ops.norm.moments import element_counts_of_peers
from distconv.ops.norm.normalize import check_parameter_types, normalize
from distconv.ops.support.merged import works_on_channels
from distconv.ops.support.metadata_checks import any_type, check_on_meta
from distconv.ops.support.operands import (
    Placement,
    as_distributed,
    common_grid,
    gather_whole,
    to_accumulation_type,
    uncut,
)
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import redistribute


def group_norm_over(
    axes: tuple[str, ...] | None,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> DistTensor:
    """Normalise each sample and group of channels by statistics over the ranks along `axes`.

    All ranks call it. If `axes` is None, these are all axes that cut the plane. With () each rank
    uses the statistics of its own block, which differs from the serial norm.
    """
    name = "group_norm"
    x = as_distributed(input, common_grid("group_norm", (input, weight, bias)))
    check_parameter_types("group_norm", x, weight, bias)
    check_on_meta(F.group_norm, any_type(x), num_groups, any_type(weight), any_type(bias), eps)
    channels, cuts = x.shape[1] // num_groups, x.cuts
    if num_groups % x.grid.topology.parts(cuts[1]) and channels != 1:
        # Some groups lie on several ranks.
        return redistribute(
            group_norm_over(axes, uncut(x, [1], name), num_groups, weight, bias, eps), cuts, name
        )
    weight, bias = own_channels(weight, x, name), own_channels(bias, x, name)
    groups = x.shard.shape[1] // max(channels, 1)
    spatial = tuple(range(2, x.dim()))
    group = tuple(a for a in cutting_axes(cuts[2:]) if axes is None or a in axes)
    block = x.shard
    sizes = thresholds(on_accelerator(block, x.grid.computes_on_gpu))
    own = sizes.own_group_norm or not has_channels_last(block)
    if not group and block.numel() and own:
        # torch.nn.functional would check the size of this block once more.
        shard = torch.group_norm(block, groups, weight, bias, eps)
        return DistTensor(shard, x.shape, cuts, x.grid)
    counts = element_counts_of_peers(Placement.of(x), spatial, group, block=channels)
    form = Form(groups, of_each_sample=True)
    shard = normalize(block, weight, bias, form, x.grid, group, counts, eps)
    return DistTensor(shard, x.shape, cuts, x.grid)


implements(F.group_norm, torch.group_norm)(
    works_on_channels(of_each_sample=True)(partial(group_norm_over, None))
)


@implements(F.instance_norm)
@works_on_channels(of_each_sample=True)
def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise each sample and channel over the plane; update running statistics if given."""
    operands = input, running_mean, running_var, weight, bias
    x = as_distributed(input, common_grid("instance_norm", operands))
    check_parameter_types("instance_norm", x, weight, bias)
    if not use_input_stats:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
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
    if running_mean is not None and running_var is not None and elements:
        with torch.no_grad():
            over = tuple(range(2, x.dim()))
            variance, mean = torch.var_mean(to_accumulation_type(x.detach()), over)
            for running, batch in ((running_mean, mean), (running_var, variance)):
                own = gather_whole(batch.mean(0), "instance_norm")
                running.lerp_(own.to(running.dtype), momentum)
    return group_norm_over(None, x, max(x.shape[1], 1), weight, bias, eps)
