"""Fully connected layers: 1x1 convolutions whose channels are the last dimension."""

from __future__ import annotations

from string import ascii_letters
from typing import cast

import torch.nn.functional as F
from torch import Tensor

from distconv.geometry.index_maps import Same
from distconv.geometry.layout import cutting_axes, replaced_at
from distconv.ops.conv.channel_algorithms import Layer, WeightMeta, algorithm, layer_part
from distconv.ops.math.product import contract
from distconv.ops.support.merged import factors_of, in_blocks, is_merged, unmerged, works_on_last
from distconv.ops.support.operands import Placement, distributed_input
from distconv.tensor.dispatch import implements, refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import gather_inputs, redistribute


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
        reason = f"the bias has shape {tuple(bias.shape)}, expected {tuple(weight.shape[:-1])}"
        refuse("linear", reason, x, way_out="Expand it")
    if weight.dim() == 1:
        row = None if bias is None else bias.unsqueeze(0)
        return linear(x, weight.unsqueeze(0), row).squeeze(-1)
    if is_merged(x):
        return _along_merged(x, weight, bias)
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


def _along_merged(x: DistTensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `linear` of an input whose features are merged, such as all flattened positions.

    For few outputs, partial sums are added up over the ranks. Otherwise each rank gets all features
    of some rows. If there are as many outputs as features, the outputs are cut as the features
    were.
    """
    own, features = unmerged(x), factors_of(x)[-1]
    lead = own.dim() - len(features)
    axes = cutting_axes(own.cuts[lead:])
    parts = own.grid.topology.parts(axes)
    if 2 * parts * weight.shape[0] < weight.shape[0] + weight.shape[1]:
        rows = ascii_letters[2 : x.dim() + 1]
        total = contract("linear", [f"{rows}a", "ba"], f"{rows}b", [x, weight])
        return total if bias is None else total + bias.to(total.dtype)
    free = [d for d in range(lead) if not own.cuts[d] and own.shape[d] >= parts]
    if not free:
        return linear(in_blocks(x), weight, bias)
    rows_of = max(free, key=lambda d: own.shape[d])
    whole = replaced_at((*own.cuts[:lead], *((),) * len(features)), rows_of, axes)
    y = linear(redistribute(own, whole, "linear").flatten(lead), weight, bias)
    if weight.shape[0] == weight.shape[1]:
        y = redistribute(cast(DistTensor, y.unflatten(-1, features)), own.cuts, "linear")
    return y.reshape((*x.shape[:-1], weight.shape[0]))
