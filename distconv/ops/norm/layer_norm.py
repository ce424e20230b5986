"""Normalisation of each sample over its last dimensions: layer and root-mean-square norm."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.geometry.layout import cutting_axes
from distconv.ops.norm.form import Form
from distconv.ops.norm.moments import element_counts_of_peers
from distconv.ops.norm.normalize import check_parameter_types, normalize
from distconv.ops.support.merged import works_on_last
from distconv.ops.support.metadata_checks import any_type, check_on_meta
from distconv.ops.support.operands import (
    Placement,
    accumulation_type,
    as_distributed,
    common_grid,
    local_operand,
)
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor


@implements(F.layer_norm, torch.layer_norm)
@works_on_last(lambda normalized_shape, *_, **__: len(normalized_shape))
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
    check_parameter_types("layer_norm", x, weight, bias)
    check_on_meta(
        F.layer_norm, any_type(x), tuple(normalized_shape), any_type(weight), any_type(bias), eps
    )
    return _normalize_last(x, normalized_shape, weight, bias, eps, "layer_norm")


@implements(F.rms_norm, torch.rms_norm)
@works_on_last(lambda normalized_shape, *_, **__: len(normalized_shape))
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> DistTensor:
    """Divide by the root of the mean square over the last dimensions, cut or not."""
    x = as_distributed(input, common_grid("rms_norm", (input, weight)))
    check_on_meta(F.rms_norm, any_type(x), tuple(normalized_shape), any_type(weight), eps)
    return _normalize_last(x, normalized_shape, weight, None, eps, "rms_norm")


def _normalize_last(
    x: DistTensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    name: str,
) -> DistTensor:
    """Return layer_norm or rms_norm, by `name`, over the dimensions of `normalized_shape`."""
    block, first = x.shard, x.dim() - len(normalized_shape)
    over = tuple(range(first, x.dim()))
    group = cutting_axes(x.cuts[first:])
    own = tuple(x.shape[first:]), x.cuts[first:], x.grid, name
    weight, bias = (local_operand(t, *own) for t in (weight, bias))
    layer = name == "layer_norm"
    if not group and block.numel():
        last = tuple(normalized_shape)
        if layer:
            shard = F.layer_norm(block, last, weight, bias, cast(float, eps))
        else:
            shard = F.rms_norm(block, last, weight, eps)
        return DistTensor(shard, x.shape, x.cuts, x.grid)
    if eps is None:
        eps = torch.finfo(accumulation_type(x.dtype)).eps
    counts = element_counts_of_peers(Placement.of(x), over, group)
    form = Form(prod(block.shape[:first]), True, centered=layer, weighs_elements=True)
    rows = block.reshape(1, form.groups, prod(block.shape[first:]))
    shard = normalize(rows, weight, bias, form, x.grid, group, counts, eps)
    return DistTensor(shard.view(block.shape), x.shape, x.cuts, x.grid)
