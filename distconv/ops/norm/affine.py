"""Weights and biases of normalisations."""

from __future__ import annotations

import torch
from torch import Tensor

from distconv.ops.support.operands import local_operand
from distconv.ops.support.types import accumulation_type, check_same_types
from distconv.tensor.dist_tensor import DistTensor


def scale_and_shift(
    x: DistTensor, shard: Tensor, weight: Tensor | None, bias: Tensor | None, name: str
) -> DistTensor:
    """Return the block `shard` times weight plus bias, which are broadcast to the tensor `x`."""
    arguments = tuple(x.shape), x.cuts, x.grid, name
    return scale_and_shift_blocks(x, shard, *(local_operand(t, *arguments) for t in (weight, bias)))


def scale_and_shift_blocks(
    x: DistTensor, shard: Tensor, weight: Tensor | None, bias: Tensor | None
) -> DistTensor:
    """Return `shard` times weight plus bias, with the blocks of both that meet the rank's own."""
    if weight is not None:
        shard = shard * weight
    if bias is not None:
        shard = shard + bias
    return DistTensor(shard.to(x.dtype), x.shape, x.cuts, x.grid)


def check_parameter_types(name: str, x: DistTensor, *parameters: Tensor | None) -> None:
    """Raise on every rank for types that differ, but for float32 parameters of half inputs."""
    half = accumulation_type(x.dtype) != x.dtype
    if not (half and all(p is None or p.dtype == torch.float32 for p in parameters)):
        check_same_types(name, x, *parameters)


def per_channel(statistic: Tensor | None, ndim: int) -> Tensor | None:
    """Return one number for each channel, to be broadcast to a tensor of `ndim` dimensions."""
    return None if statistic is None else statistic.reshape(-1, *(1,) * (ndim - 2))
