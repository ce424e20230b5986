"""Counts of elements: those not 0, those not nan, by value, and by interval.

Each rank counts in its own block, and the counts are added up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distconv.comm.collectives import all_reduce_with_grad
from distconv.geometry.layout import cutting_axes
from distconv.ops.reduce.extrema import extreme
from distconv.ops.reduce.sums import Dims, sum_by
from distconv.ops.support.merged import works_along
from distconv.ops.support.operands import common_grid, local_operand
from distconv.tensor.dispatch import implements, refuse
from distconv.tensor.dist_tensor import DistTensor


@implements(torch.nansum, torch.Tensor.nansum)
@works_along(reduces=True)
def nansum(
    input: Any, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    _require_real("nansum", input)
    return sum_by(torch.nansum, input, dim, keepdim, dtype)


@implements(torch.nanmean, torch.Tensor.nanmean)
def nanmean(
    input: Any, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    if not (input.is_floating_point() or input.is_complex()):
        raise NotImplementedError(
            f"nanmean: not implemented for {input.dtype}; convert it, x.double()"
        )
    count = input.detach().isnan().logical_not().sum(dim, keepdim)
    return nansum(input, dim, keepdim, dtype=dtype) / count


def _require_real(name: str, input: Tensor) -> None:
    if input.is_complex():
        raise NotImplementedError(f"{name}: not implemented for {input.dtype}; take its real part")


def _added(local: Tensor, x: DistTensor) -> DistTensor:
    """Return the sum of the ranks' counts over the parts of `x`; whole on every rank."""
    total = all_reduce_with_grad(local, x.grid, cutting_axes(x.cuts))
    return DistTensor(total, total.shape, ((),) * total.dim(), x.grid)


@implements(torch.bincount, torch.Tensor.bincount)
def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> DistTensor:
    common_grid("bincount", (input, weights))
    if not isinstance(input, DistTensor):
        refuse(
            "bincount",
            "a plain vector is counted by distributed weights",
            weights,
            way_out="Distribute both, or use weights.full_tensor()",
        )
    if input.dim() != 1 or input.is_floating_point() or input.is_complex() or minlength < 0:
        raise RuntimeError(
            f"bincount: an input {tuple(input.shape)} of {input.dtype} with minlength={minlength}; "
            "expected a vector of whole numbers, and a length from 0"
        )
    if weights is not None and weights.shape != input.shape:
        raise RuntimeError(
            f"bincount: weights {tuple(weights.shape)} for an input {tuple(input.shape)}"
        )
    if input.numel():
        low, high = (extreme("bincount", input, None, False, m).shard.item() for m in (False, True))
        if low < 0:
            raise RuntimeError(f"bincount: the input has the element {low}; expected such from 0")
        minlength = max(minlength, int(high) + 1)
    own = local_operand(weights, tuple(input.shape), input.cuts, input.grid, "bincount")
    return _added(torch.bincount(input.shard, own, minlength), input)
