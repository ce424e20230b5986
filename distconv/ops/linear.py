"""Fully connected layers: the last dimension has to be whole, the others may be cut."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from distconv.ops.align import uncut, whole
from distconv.ops.windowed import input_of
from distconv.tensor import DistTensor, implements, refuse


@implements(F.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> DistTensor:
    """x A^T + b over the last dimension, which is redistributed to be whole where it is cut."""
    x = input_of("linear", input, weight, bias)
    if x.shape[-1] != weight.shape[-1]:
        raise RuntimeError(
            f"linear: the input {tuple(x.shape)} ends in {x.shape[-1]} features, the weight "
            f"{tuple(weight.shape)} takes {weight.shape[-1]}"
        )
    if bias is not None and tuple(bias.shape) != tuple(weight.shape[:-1]):
        refuse(
            "linear",
            f"the bias has shape {tuple(bias.shape)}, expected {tuple(weight.shape[:-1])}",
            x,
            way_out="Expand it",
        )
    x = uncut(x, [x.dim() - 1], "linear")
    shard = F.linear(x.shard, whole(weight, "linear"), whole(bias, "linear"))
    features = tuple(weight.shape[:-1])
    cuts = (*x.cuts[:-1], *((),) * len(features))
    return DistTensor(shard, (*x.shape[:-1], *features), cuts, x.grid)
