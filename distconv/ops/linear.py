"""Fully connected layers: 1x1 convolutions whose channels are the last dimension."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from distconv.geometry.index_maps import Same
from distconv.ops.conv.channel_algorithms import Layer, WeightMeta, algorithm, layer_part
from distconv.ops.support.merged import works_on_last
from distconv.ops.support.operands import Placement
from distconv.ops.support.types import distributed_input
from distconv.tensor.dispatch import implements, refuse
from distconv.tensor.redistribution import gather_inputs


@implements(F.linear)
@works_on_last(lambda weight, bias=None: weight.dim() - 1)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x A^T + b over the last dimension: (..., in) to (..., out), A of shape (out, in)."""
    x = distributed_input("linear", input, weight, bias)
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
    if weight.dim() == 1:
        row = None if bias is None else bias.unsqueeze(0)
        return linear(x, weight.unsqueeze(0), row).squeeze(-1)
    shape = (*x.shape[:-1], weight.shape[0])
    needs = (Same(),) * x.dim()
    layer = Layer(
        "linear",
        Placement.of(x),
        WeightMeta.of(weight, bias),
        shape,
        needs,
        algorithm(),
        dimension=x.dim() - 1,
    )
    part = layer_part(layer)
    weight, bias, late = part.operands(weight, bias)
    buffer = gather_inputs(x, part.needs, part.cuts, part.operator)
    return part.finish(F.linear(buffer, weight, bias), late, x.grid)
