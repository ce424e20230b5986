"""Normalisation of each sample over its last dimensions: layer and root-mean-square norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.geometry.layout import cutting_axes
from distconv.ops.norm.affine import check_parameter_types, scale_and_shift
from distconv.ops.norm.moments import Standardize, element_counts_of_peers
from distconv.ops.reduce.sums import mean as mean_of
from distconv.ops.support.merged import works_on_last
from distconv.ops.support.metadata_checks import any_type, check_on_meta
from distconv.ops.support.operands import Placement, as_distributed, common_grid, gather_whole
from distconv.ops.support.types import to_accumulation_type
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import redistribute


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
    weight, bias = gather_whole(weight, "layer_norm"), gather_whole(bias, "layer_norm")
    check_on_meta(
        F.layer_norm, any_type(x), tuple(normalized_shape), any_type(weight), any_type(bias), eps
    )
    over = tuple(range(x.dim() - len(normalized_shape), x.dim()))
    group = cutting_axes(x.cuts[d] for d in over)
    if not group and x.shard.numel():
        shard = F.layer_norm(x.shard, tuple(normalized_shape), weight, bias, eps)
        return DistTensor(shard, x.shape, x.cuts, x.grid)
    counts = element_counts_of_peers(Placement.of(x), over, group)
    shard, _, _ = Standardize.apply(x.shard, over, x.grid, group, counts, eps)
    return scale_and_shift(x, shard, weight, bias, "layer_norm")


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
    over = list(range(x.dim() - len(normalized_shape), x.dim()))
    wide: Any = DistTensor(to_accumulation_type(x.shard), x.shape, x.cuts, x.grid)
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    scale = torch.rsqrt(mean_of(wide * wide, over, keepdim=True) + eps)
    return scale_and_shift(
        x, redistribute(wide * scale, x.cuts, "rms_norm").shard, weight, None, "rms_norm"
    )
