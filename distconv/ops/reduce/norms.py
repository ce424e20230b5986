"""Norms over any dimensions, cut or not, and functions that divide by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.comm.collectives import all_gather, all_reduce_with_grad
from distconv.comm.shard_function import ShardFunction
from distconv.geometry.layout import cuts_of_broadcast, cutting_axes
from distconv.grid.interface import Grid
from distconv.ops.reduce.extrema import extreme
from distconv.ops.reduce.sums import Dims, reduction_result
from distconv.ops.support.argument_forms import normalize_dims
from distconv.ops.support.merged import factors_of, is_merged, merge_as, unmerged, works_along
from distconv.ops.support.metadata_checks import check_on_meta
from distconv.ops.support.operands import (
    as_distributed,
    broadcast_shape,
    common_grid,
    local_operand,
)
from distconv.tensor.dispatch import implements, refuse
from distconv.tensor.dist_tensor import DistTensor


class _VectorNorm(ShardFunction):
    """The norm over dimensions, computed from the ranks' norms, with torch's gradient of it.

    Autograd through the ranks' norms would differ beside zeros, infinities and nan of other ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, order: float, over: tuple[int, ...], grid: Grid, axes: tuple[str, ...]
    ) -> Tensor:
        norm = torch.linalg.vector_norm(x, order, over, True)
        if axes:
            norms = all_gather(norm, grid, axes)
            norm = norms.sum(0) if order == 0 else torch.linalg.vector_norm(norms, order, 0)
        ctx.save_for_backward(x, norm)
        ctx.movement = order, grid, axes
        return norm

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, norm = ctx.saved_tensors
        order, grid, axes = ctx.movement
        if order == 0:
            return None, None, None, None, None
        gradient = all_reduce_with_grad(grads[0], grid, axes)
        return _gradient(x, order, norm, gradient), None, None, None, None


def _gradient(x: Tensor, order: float, norm: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of `x` from a norm's gradient, as torch's norm_backward does."""
    if order == 1:
        return x.sgn() * gradient
    if order == 2:
        return (x / norm.masked_fill(norm == 0, torch.inf)).mul_(gradient)
    if order < 1:
        powers = (x.sgn() * x.abs().pow(order - 1)).masked_fill(x == 0, 0)
        return powers * gradient * norm.pow(1 - order)
    powers = x.sgn() * x.abs().pow(order - 1) if order < 2 else x * x.abs().pow(order - 2)
    return powers * (gradient / norm.pow(order - 1)).masked_fill(norm == 0, 0)


@implements(torch.linalg.vector_norm)
@works_along(reduces=True)
def vector_norm(
    input: DistTensor,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> DistTensor:
    """Return the norm of order `ord` over dimensions, from the norms of the ranks."""
    if ord < 0:
        way_out = "Use an order from 0, or x.full_tensor()"
        refuse("vector_norm", f"the order {ord} is not supported", input, way_out=way_out)

    if ord == float("inf"):
        x = input.abs() if dtype is None else input.to(dtype).abs()
        return extreme("vector_norm", x, dim, keepdim, True)

    over = normalize_dims(dim, input.dim())
    axes = cutting_axes(input.cuts[d] for d in over)
    x = input.shard if dtype is None else input.shard.to(dtype)
    value = _VectorNorm.apply(x, float(ord), over, input.grid, axes)
    return reduction_result(input, value, over, keepdim)


@implements(torch.norm, torch.Tensor.norm, torch.functional.norm)
def norm(
    input: DistTensor,
    p: Any = "fro",
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> DistTensor:
    """Return the norm over dimensions; of matrices only the Frobenius norm."""
    if p == "nuc":
        refuse("norm", "the nuclear norm is not supported", input, way_out="Use x.full_tensor()")
    if p == "fro" and isinstance(dim, Sequence) and len(dim) > 2:
        raise RuntimeError(f"norm: a matrix has two dimensions, not dim={tuple(dim)}; pass p=2")
    return vector_norm(input, 2.0 if p in ("fro", None) else p, dim, keepdim, dtype=dtype)


@implements(F.cosine_similarity)
def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    shape = broadcast_shape("cosine_similarity", (x1, x2))
    directions = []
    for x in (x1.expand(shape), x2.expand(shape)):
        length = torch.linalg.vector_norm(x, 2, dim, keepdim=True)
        # As in torch, the gradient ignores the limit.
        bounded = length.clone()
        with torch.no_grad():
            bounded.clamp_(min=eps)
        directions.append(x / bounded)
    return (directions[0] * directions[1]).sum(dim)


@implements(torch.cdist)
def cdist(
    x1: Tensor,
    x2: Tensor,
    p: float = 2.0,
    compute_mode: str | None = "use_mm_for_euclid_dist_if_necessary",
) -> DistTensor:
    """Return the distances of all (..., P, M) from all (..., R, M) vectors.

    The second operand and the elements of all vectors are made whole; leading dimensions and P stay
    cut.
    """
    grid = common_grid("cdist", (x1, x2))
    shape = check_on_meta(torch.cdist, x1, x2, p, compute_mode)
    mode = _mode(compute_mode, shape[-2:])
    if is_merged(x1) and not is_merged(x2) and x2.dim() == 2 and len(factors_of(x1)[-1]) == 1:
        return cast(DistTensor, merge_as(cdist(unmerged(x1), x2, p, mode), shape))
    left, right = as_distributed(x1, grid), as_distributed(x2, grid)
    rows = (*left.shape[:-1], 1), (*left.cuts[:-1], ())
    columns = (*right.shape[:-2], 1, 1), (*right.cuts[:-2], (), ())
    cuts = cuts_of_broadcast((rows, columns), (*shape[:-1], 1))
    first, second = (
        local_operand(x1, (*shape[:-1], x1.shape[-1]), cuts, grid, "cdist"),
        local_operand(x2, (*shape[:-2], *x2.shape[-2:]), (*cuts[:-2], (), ()), grid, "cdist"),
    )
    return DistTensor(torch.cdist(first, second, p=p, compute_mode=mode), shape, cuts, grid)


def _mode(compute_mode: str | None, vectors: Sequence[int]) -> str:
    """Return the `compute_mode` that torch.cdist uses for these global numbers of vectors.

    By default torch takes a faster, less accurate algorithm for many vectors. Every rank takes the
    algorithm for the global numbers, whatever the size of its block.
    """
    by_product = compute_mode == "use_mm_for_euclid_dist" or (
        compute_mode in (None, "use_mm_for_euclid_dist_if_necessary") and max(vectors) > 25
    )
    return "use_mm_for_euclid_dist" if by_product else "donot_use_mm_for_euclid_dist"
