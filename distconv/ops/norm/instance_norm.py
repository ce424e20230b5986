"""Normalisation of each sample and channel."""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.comm.collectives import all_reduce
from distconv.geometry.layout import cutting_axes
from distconv.ops.norm.batch_norm import batch_norm, gather_running_statistics, own_channels
from distconv.ops.norm.form import Form
from distconv.ops.norm.moments import element_counts_of_peers
from distconv.ops.norm.normalize import check_parameter_types, normalize
from distconv.ops.support.merged import works_on_channels
from distconv.ops.support.metadata_checks import any_type, check_on_meta
from distconv.ops.support.operands import Placement, as_distributed, common_grid
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor


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

    def update(mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics with the mean over the samples."""
        if running_mean is None or running_var is None or not elements:
            return
        sums = torch.stack([mean, variance * (elements / (elements - 1))]).sum(1)
        axes = cutting_axes(x.cuts[:1])
        total = all_reduce(sums, x.grid, axes) if axes else sums
        running = running_mean, running_var
        own = [own_channels(t, x, "instance_norm") for t in running]
        with torch.no_grad():
            for t, batch in zip(own, total, strict=True):
                assert t is not None
                t.lerp_((batch / x.shape[0]).to(t.dtype), momentum)
        gather_running_statistics(x, running, own, "instance_norm")

    weight, bias = (own_channels(t, x, "instance_norm") for t in (weight, bias))
    form = Form(x.shard.shape[1], of_each_sample=True)
    shard = normalize(x.shard, weight, bias, form, x.grid, group, counts, eps, update)
    return DistTensor(shard, x.shape, x.cuts, x.grid)
