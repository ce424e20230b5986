"""Sums, means and counts over any dimensions: sums of each block, followed by an all-reduce."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from distconv.comm.collectives import all_reduce_with_grad
from distconv.geometry.layout import cutting_axes
from distconv.ops.support.arguments import normalize_dims
from distconv.ops.support.dimensions import works_along
from distconv.ops.support.operands import accumulation_type, common_grid, local_operand
from distconv.tensor.dispatch import implements, refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.memory_format import reduce_in_order_of_memory

Dims = int | Sequence[int] | None


def reduction_result(
    input: DistTensor, shard: Tensor, over: tuple[int, ...], keepdim: bool
) -> DistTensor:
    """Return the DistTensor that results from a reduction of `input` over the dimensions `over`.

    `shard` is this rank's block of the result, with size 1 along the dimensions `over`. No
    communication.
    """
    kept = [d for d in range(input.dim()) if keepdim or d not in over]
    return DistTensor(
        shard if keepdim or not over else shard.squeeze(over),
        [1 if d in over else input.shape[d] for d in kept],
        tuple(() if d in over else input.cuts[d] for d in kept),
        input.grid,
    )


@implements(torch.sum, torch.Tensor.sum)
@works_along(reduces=True)
def sum(
    input: DistTensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> DistTensor:
    """Return the sum over `dim`, replicated over the grid axes that partition `dim`. Collective."""
    return sum_by(torch.sum, input, dim, keepdim, dtype)


def sum_by(
    function: Callable[..., Tensor],
    input: DistTensor,
    dim: Dims,
    keepdim: bool,
    dtype: torch.dtype | None,
) -> DistTensor:
    """Return a sum over dimensions `dim`: `function` of each block, then an all-reduce. Collective.

    `function` is torch.sum or torch.nansum. `dtype` is its argument, or None.
    """
    over = normalize_dims(dim, input.dim())
    if over:
        local = reduce_in_order_of_memory(function, input.shard, over, dtype=dtype)
    else:
        local = function(input.shard, dtype=dtype)
    axes = cutting_axes(map(input.cuts.__getitem__, over))
    return reduction_result(input, all_reduce_with_grad(local, input.grid, axes), over, keepdim)


@implements(torch.mean, torch.Tensor.mean)
@works_along(reduces=True)
def mean(
    input: DistTensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> DistTensor:
    """Return the mean of the global tensor over dimensions `dim`. Collective.

    The result is not partitioned along `dim`, and is replicated over the grid axes that partitioned
    `dim`. Raises `NotImplementedError` on every rank if the type of the result is neither
    floating-point nor complex.
    """
    kind = dtype or input.dtype
    if not (kind.is_floating_point or kind.is_complex):
        raise NotImplementedError(
            f"mean(): the result type of {kind} is not floating; convert the input, or pass dtype="
        )
    count = prod(map(input.shape.__getitem__, normalize_dims(dim, input.dim())))
    # The sum of many numbers of a half type may leave the range of the type; the mean does not.
    total = sum(input, dim, keepdim, dtype=accumulation_type(kind))
    shard = total.shard / count if count else total.shard * torch.nan
    return DistTensor(shard.to(kind), total.shape, total.cuts, total.grid)


@implements(torch.nansum, torch.Tensor.nansum)
@works_along(reduces=True)
def nansum(
    input: Any, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    _require_real("nansum", input)
    return sum_by(torch.nansum, input, dim, keepdim, dtype)


def _require_real(name: str, input: Tensor) -> None:
    if input.is_complex():
        raise NotImplementedError(f"{name}: not implemented for {input.dtype}; take its real part")


def _sum_over_blocks(local: Tensor, x: DistTensor) -> DistTensor:
    """Return the sum of `local` over the ranks with different blocks of `x`, on every rank.

    `local` has one shape on all ranks; replicas of a block count once. Collective.
    """
    total = all_reduce_with_grad(local, x.grid, cutting_axes(x.cuts))
    return DistTensor(total, total.shape, ((),) * total.dim(), x.grid)


@implements(torch.bincount, torch.Tensor.bincount)
def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> DistTensor:
    common_grid("bincount", (input, weights))
    if not isinstance(input, DistTensor):
        reason = "a plain vector is combined with distributed weights"
        refuse("bincount", reason, weights, way_out="Distribute both, or use weights.full_tensor()")
    if input.dim() != 1 or input.is_floating_point() or input.is_complex() or minlength < 0:
        raise RuntimeError(
            f"bincount: an input {tuple(input.shape)} of {input.dtype} with "
            f"minlength={minlength}; expected a vector of whole numbers, and a length of 0 or more"
        )
    if weights is not None and weights.shape != input.shape:
        raise RuntimeError(
            f"bincount: weights {tuple(weights.shape)} for an input {tuple(input.shape)}"
        )
    if input.numel():
        low, high = (int(x) for x in torch.aminmax(input))
        if low < 0:
            raise RuntimeError(
                f"bincount: the input has the element {low}; expected numbers of 0 or more"
            )
        minlength = max(minlength, high + 1)
    own = local_operand(weights, tuple(input.shape), input.cuts, input.grid, "bincount")
    return _sum_over_blocks(torch.bincount(input.shard, own, minlength), input)
