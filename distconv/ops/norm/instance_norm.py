"""Normalisation of each sample and channel."""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.ops.norm.batch_norm import batch_norm
from distconv.ops.norm.group_norm import group_norm_over
from distconv.ops.norm.normalize import check_parameter_types
from distconv.ops.support.merged import works_on_channels
from distconv.ops.support.metadata_checks import any_type, check_on_meta
from distconv.ops.support.operands import (
    as_distributed,
    common_grid,
    gather_whole,
    to_accumulation_type,
)
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
    """Normalise each sample and channel over the plane; update running statistics if given."""
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
    if running_mean is not None and running_var is not None and elements:
        with torch.no_grad():
            over = tuple(range(2, x.dim()))
            variance, mean = torch.var_mean(to_accumulation_type(x.detach()), over)
            for running, batch in ((running_mean, mean), (running_var, variance)):
                own = gather_whole(batch.mean(0), "instance_norm")
                running.lerp_(own.to(running.dtype), momentum)
    return group_norm_over(None, x, max(x.shape[1], 1), weight, bias, eps)
