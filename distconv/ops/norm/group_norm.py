"""Normalisation of each sample and group of channels, over the plane or each rank's block of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.comm.packing import has_channels_last
from distconv.geometry.layout import cutting_axes
from distconv.ops.norm.batch_norm import own_channels
from distconv.ops.norm.form import Form
from distconv.ops.norm.moments import element_counts_of_peers
from distconv.ops.norm.normalize import check_parameter_types, normalize
from distconv.ops.support.merged import works_on_channels
from distconv.ops.support.metadata_checks import any_type, check_on_meta
from distconv.ops.support.operands import Placement, as_distributed, common_grid, uncut
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import redistribute


@implements(F.group_norm, torch.group_norm)
@works_on_channels(of_each_sample=True)
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> DistTensor:
    """Normalise each sample and group of channels over the whole plane."""
    return group_norm_over(None, input, num_groups, weight, bias, eps)


def group_norm_over(
    axes: tuple[str, ...] | None,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> DistTensor:
    """Normalise each sample and group of channels by statistics over the ranks along `axes`.

    All ranks call it. None means all axes that cut the plane. With () each rank uses the statistics
    of its own block, which differs from the serial norm.
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
    if not group and block.numel() and not has_channels_last(block):
        # torch.nn.functional would check the size of this block once more. With channels last torch
        # takes several times as long, and computes the variance as E[x^2] - E[x]^2.
        shard = torch.group_norm(block, groups, weight, bias, eps)
        return DistTensor(shard, x.shape, cuts, x.grid)
    counts = element_counts_of_peers(Placement.of(x), spatial, group, block=channels)
    form = Form(groups, of_each_sample=True)
    shard = normalize(block, weight, bias, form, x.grid, group, counts, eps)
    return DistTensor(shard, x.shape, cuts, x.grid)
