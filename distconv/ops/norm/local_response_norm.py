"""Normalisation over neighbouring channels."""

from __future__ import annotations

import torch.nn.functional as F

from distconv.ops.support.metadata_checks import any_type, check_on_meta
from distconv.ops.support.operands import uncut
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import redistribute


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
        # torch divides integers here, unless there are none.
        shard = x.shard / 1 if x.numel() else x.shard.clone()
    y = DistTensor(shard, x.shape, x.cuts, x.grid)
    return redistribute(y, input.cuts, "local_response_norm")
