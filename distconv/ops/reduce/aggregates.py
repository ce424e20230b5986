"""Norms, variances, torch.all and torch.any, and logarithms of sums of exponentials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod as product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.comm.collectives import all_gather, all_gather_with_grad, all_reduce_with_grad
from distconv.geometry.layout import cuts_of_broadcast, cutting_axes
from distconv.grid.interface import Grid
from distconv.ops.norm.statistics import combined, element_counts_of_peers
from distconv.ops.reduce.extrema import extreme
from distconv.ops.reduce.sums import Dims, reduction_result
from distconv.ops.reduce.sums import sum as sum_of
from distconv.ops.support.arguments import check_on_meta, normalize_dims
from distconv.ops.support.dimensions import works_along, works_on_last
from distconv.ops.support.operands import (
    Placement,
    as_distributed,
    broadcast_shape,
    common_grid,
    local_operand,
    to_accumulation_type,
)
from distconv.tensor.dispatch import implements, refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.memory_format import reduce_in_order_of_memory
from distconv.torch_private import ShardFunction

# Norms over any dimensions, partitioned or not, and functions that divide by norms.


class _VectorNorm(ShardFunction):
    """The norm over dimensions `over`, computed from the norms of the blocks along `axes`.

    The gradient is torch's gradient of the norm of the global tensor. Autograd through the norms of
    blocks would return another gradient if another block has zeros, infinities or nan.
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
    """Return the gradient of a block `x` of the input of a norm, as torch's norm_backward does.

    `norm` is the value of the norm of order `order`, and `gradient` is the gradient of that value.
    """
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
    """Return the norm of order `ord`, 0 or more, over dimensions `dim`. Collective."""
    if ord < 0:
        way_out = "Use an order of 0 or more, or x.full_tensor()"
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
    """Return the norm of order `p` over `dim`; of matrices only the Frobenius norm. Collective."""
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
    """Return the distances between the vectors of `x1`, (..., P, M), and of `x2`, (..., R, M).

    The result, (..., P, R), stays partitioned over the leading dimensions and P. Dimensions M and R
    are gathered first. Collective.
    """
    grid = common_grid("cdist", (x1, x2))
    shape = check_on_meta(torch.cdist, x1, x2, p, compute_mode)
    return _distances(x1, x2, p, _mode(compute_mode, shape[-2:]), grid)


@works_on_last(lambda x2, *_: int(x2.dim() == 2))
def _distances(x1: Tensor, x2: Tensor, p: float, mode: str, grid: Grid) -> DistTensor:
    """Return torch.cdist(x1, x2, p), with `mode` as its `compute_mode`. Collective."""
    shape = check_on_meta(torch.cdist, x1, x2, p, mode)
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
    """Return the `compute_mode` that serial torch.cdist would use.

    `vectors` are the global numbers of vectors, P and R. By default torch uses a faster, less
    accurate algorithm for more than 25 vectors. Blocks have fewer vectors, so the choice is made
    here.
    """
    by_product = compute_mode == "use_mm_for_euclid_dist" or (
        compute_mode in (None, "use_mm_for_euclid_dist_if_necessary") and max(vectors) > 25
    )
    return "use_mm_for_euclid_dist" if by_product else "donot_use_mm_for_euclid_dist"


# torch.all and torch.any, variances, and logarithms of sums of exponentials.


def _is_empty_sequence(dim: Any) -> bool:
    """Return whether `dim` is an empty sequence, for which some functions reduce no dimension."""
    return isinstance(dim, Sequence) and not dim


@implements(torch.logsumexp, torch.Tensor.logsumexp, torch.special.logsumexp)
@works_along(reduces=True)
def logsumexp(input: DistTensor, dim: Dims, keepdim: bool = False) -> DistTensor:
    if _is_empty_sequence(dim) and input.dim():
        raise RuntimeError("logsumexp: dim is empty; expected at least one dimension")
    over = normalize_dims(dim, input.dim())
    x = input.shard
    if not (input.is_floating_point() or input.is_complex()):
        x = x.to(torch.get_default_dtype())
    # A block of -inf only contributes nothing, and its gradient is 0.
    largest = torch.zeros((), dtype=x.dtype, device=x.device)
    if all(input.shape[d] for d in over):
        # torch.real returns a real tensor itself.
        real = torch.real(input.detach())
        largest = extreme("logsumexp", real, over, True, True).shard.to(x.dtype)
        largest = torch.where(largest.isfinite(), largest, 0)
    terms = DistTensor((x - largest).exp(), input.shape, input.cuts, input.grid)
    total = sum_of(terms, over, True)
    return reduction_result(input, total.shard.log() + largest, over, keepdim)


def _of_truth(function: Callable[..., Tensor], method: Callable[..., Tensor]) -> None:
    """Register a rule for `function`, torch.all or torch.any, and its method of torch.Tensor."""

    @implements(function, method)
    @works_along(reduces=True)
    def rule(input: DistTensor, dim: Dims = None, keepdim: bool = False) -> DistTensor:
        if _is_empty_sequence(dim):
            return DistTensor(input.shard != 0, input.shape, input.cuts, input.grid)
        over = normalize_dims(dim, input.dim())
        own = reduce_in_order_of_memory(function, input.shard, over)
        axes = cutting_axes(input.cuts[d] for d in over)
        if axes:
            own = function(all_gather_with_grad(own, input.grid, axes), 0)
        return reduction_result(input, own, over, keepdim)


_of_truth(torch.all, Tensor.all)
_of_truth(torch.any, Tensor.any)


class _Moments(ShardFunction):
    """Mean and biased variance over dimensions, with one message forward and one backward.

    `counts` are the numbers of elements per result of each block along `axes`. As in torch, the
    gradient of the variance leaves out the term with the sum of x - mean. The sum is 0, or nan if
    an element is infinite.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        over: tuple[int, ...],
        grid: Grid,
        axes: tuple[str, ...],
        counts: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        if x.numel():
            mean = reduce_in_order_of_memory(torch.mean, x, over)
            squares = torch.ops.aten.mse_loss(x, mean, 0)
            own = torch.stack([mean, reduce_in_order_of_memory(torch.mean, squares, over)])
        else:
            own = x.new_zeros(2, *(1 if d in over else n for d, n in enumerate(x.shape)))
        mean, variance = combined(own, grid, axes, counts)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, mean)
        ctx.movement = grid, axes, max(sum(counts), 1)
        return mean, variance

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, mean = ctx.saved_tensors
        grid, axes, count = ctx.movement
        given = [g for g in grads if g is not None]
        sums = list(all_reduce_with_grad(torch.stack(given), grid, axes) / count)
        dx = torch.zeros_like(x) if grads[1] is None else (x - mean).mul_(2 * sums.pop())
        if sums:
            dx = dx.add_(sums.pop())
        return dx, None, None, None, None


def _variance(
    input: DistTensor, dim: Any, unbiased: Any, correction: Any, keepdim: bool
) -> tuple[DistTensor, DistTensor]:
    """Return the variance and the mean over dimensions `dim`, as torch.var_mean. Collective.

    The variance is computed from squared deviations, so that large means do not cancel. Raises
    UnsupportedOperation for corrections and dimensions that do not give a finite variance.
    """
    if isinstance(dim, bool):  # var(input, unbiased)
        dim, unbiased = None, dim
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    over = normalize_dims(dim, input.dim())
    count = product(input.shape[d] for d in over)
    # torch's gradients of the variance of all elements do not match an infinite variance.
    infinite = count == correction > 1 and (dim is None or not input.dim())
    if _is_empty_sequence(dim) or infinite or (count and not correction <= count):
        reason = f"dim={dim!r} with correction={correction} of {count} elements is not supported"
        way_out = "Name the dimensions, and choose a correction of at most the number of elements"
        refuse("var", reason, input, way_out=way_out)
    axes = cutting_axes(input.cuts[d] for d in over)
    x, place = to_accumulation_type(input.shard), Placement.of(input)
    x = torch.view_as_real(x) if x.is_complex() else x
    counts = element_counts_of_peers(place, over, axes)
    mean, biased = _Moments.apply(x, over, input.grid, axes, counts)
    variance = biased * count / max(count - correction, 0)
    if not count:
        mean = mean * torch.nan
    if input.is_complex():
        mean, variance = torch.view_as_complex(mean), variance.sum(-1)
    else:
        mean, variance = mean.to(input.dtype), variance.to(input.dtype)
    spread, center = (reduction_result(input, t, over, keepdim) for t in (variance, mean))
    return spread, center


def _root(variance: Tensor) -> Tensor:
    """Return the square root of `variance`, with gradient 0 where `variance` is 0, as torch.std."""
    zero = variance == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, variance).sqrt())


def _register_deviation(name: str, root: bool, pair: bool) -> None:
    @implements(getattr(torch, name), *([] if pair else [getattr(torch.Tensor, name)]))
    @works_along(reduces=True)
    def rule(
        input: DistTensor,
        dim: Any = None,
        unbiased: bool | None = None,
        keepdim: bool = False,
        *,
        correction: float | None = None,
    ) -> Any:
        variance, center = _variance(input, dim, unbiased, correction, keepdim)
        spread = _root(variance) if root else variance
        return (spread, center) if pair else spread


_register_deviation("var", root=False, pair=False)
_register_deviation("std", root=True, pair=False)
_register_deviation("var_mean", root=False, pair=True)
_register_deviation("std_mean", root=True, pair=True)
