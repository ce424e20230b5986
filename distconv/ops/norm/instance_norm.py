"""Normalisation of each sample and channel."""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.comm.collectives import all_reduce
from distconv.geometry.layout import cutting_axes
from distconv.ops.norm.affine import check_parameter_types, per_channel, scale_and_shift
from distconv.ops.norm.batch_norm import batch_norm, gather_running_statistics, own_channels
from distconv.ops.norm.moments import Standardize, element_counts_of_peers
from distconv.ops.support.merged import works_on_channels
from distconv.ops.support.metadata_checks import any_type, check_on_meta
from distconv.ops.support.operands import Placement, as_distributed, common_grid
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor


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
) -> DistTensor:
    """Normalise each sample and channel over the whole plane; running statistics on request."""
    x = as_distributed(input, common_grid("instance_norm", (input, weight, bias)))
    check_parameter_types("instance_norm", x, weight, bias)
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
    weight, bias = per_channel(weight, x.dim()), per_channel(bias, x.dim())
    return scale_and_shift(x, shard, weight, bias, "instance_norm")
