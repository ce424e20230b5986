"""Reductions, such as products and norms, in which the ranks' results are reduced alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod as product
from typing import Any

import torch
from torch import Tensor

from distconv.comm.collectives import all_gather_with_grad
from distconv.comm.shard_function import ShardFunction
from distconv.geometry.layout import cutting_axes
from distconv.ops.reduce.extrema import extreme
from distconv.ops.reduce.sums import Dims, mean, reduction_result
from distconv.ops.reduce.sums import sum as sum_of
from distconv.ops.support.argument_forms import normalize_dim, normalize_dims
from distconv.ops.support.merged import works_along
from distconv.ops.support.operands import uncut
from distconv.ops.support.types import to_accumulation_type
from distconv.tensor.dispatch import implements, refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import redistribute


def _aggregate(
    input: DistTensor,
    dim: Dims,
    keepdim: bool,
    local: Callable[[Tensor, tuple[int, ...]], Tensor],
    among: Callable[[Tensor], Tensor] | None = None,
) -> DistTensor:
    """Reduce the block over dimensions, which stay, and then the ranks' results over the first."""
    over = normalize_dims(dim, input.dim())
    axes = cutting_axes(input.cuts[d] for d in over)
    own = local(input.shard, over)
    if not axes:
        return reduction_result(input, own, over, keepdim)
    parts = all_gather_with_grad(own, input.grid, axes)
    combined = among(parts) if among is not None else local(parts, (0,)).squeeze(0)
    return reduction_result(input, combined, over, keepdim)


def _names_nothing(dim: Any) -> bool:
    """Return whether `dim` is an empty sequence, which some functions do not take for all."""
    return isinstance(dim, Sequence) and not dim


def _as_booleans(input: DistTensor) -> DistTensor:
    return DistTensor(input.shard != 0, input.shape, input.cuts, input.grid)


@implements(torch.prod, torch.Tensor.prod)
def prod(
    input: DistTensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> DistTensor:
    """Return the product over one dimension, or over all, which become whole on every rank.

    Where an element is 0 or infinite, its gradient is the product of all others, on other ranks
    too.
    """
    if dim is None:
        x = redistribute(input, ((),) * input.dim(), "prod")
        return DistTensor(torch.prod(x.shard, dtype=dtype), (), (), x.grid)
    d = normalize_dim(dim, input.dim())
    x = uncut(input, [d], "prod")
    shard = torch.prod(x.shard, d, keepdim, dtype=dtype)
    if not input.dim():
        return DistTensor(shard, (), (), x.grid)
    return reduction_result(x, shard if keepdim else shard.unsqueeze(d), (d,), keepdim)


@implements(torch.logsumexp, torch.Tensor.logsumexp, torch.special.logsumexp)
@works_along(reduces=True)
def logsumexp(input: DistTensor, dim: Dims, keepdim: bool = False) -> DistTensor:
    """Return the logarithm of the sum of exponentials over dimensions."""
    if _names_nothing(dim):
        raise RuntimeError("logsumexp: dim names no dimension; expected at least one")
    over = normalize_dims(dim, input.dim())
    x = input.shard
    if not (input.is_floating_point() or input.is_complex()):
        x = x.to(torch.get_default_dtype())
    # A block that is -inf throughout adds nothing, and its gradient is 0.
    largest = torch.zeros((), dtype=x.dtype, device=x.device)
    if all(input.shape[d] for d in over):
        # torch.real is the tensor itself where it is real.
        real = torch.real(input.detach())
        largest = extreme("logsumexp", real, over, True, True).shard.to(x.dtype)
        largest = torch.where(largest.isfinite(), largest, 0)
    terms = DistTensor((x - largest).exp(), input.shape, input.cuts, input.grid)
    total = sum_of(terms, over, True)
    return reduction_result(input, total.shard.log() + largest, over, keepdim)


@implements(torch.all, torch.Tensor.all)
@works_along(reduces=True)
def all_(input: DistTensor, dim: Dims = None, keepdim: bool = False) -> DistTensor:
    """Return whether all elements along dimensions are true."""
    if _names_nothing(dim):
        return _as_booleans(input)
    return _aggregate(input, dim, keepdim, lambda x, over: torch.all(x, over, keepdim=True))


@implements(torch.any, torch.Tensor.any)
@works_along(reduces=True)
def any_(input: DistTensor, dim: Dims = None, keepdim: bool = False) -> DistTensor:
    """Return whether any element along dimensions is true."""
    if _names_nothing(dim):
        return _as_booleans(input)
    return _aggregate(input, dim, keepdim, lambda x, over: torch.any(x, over, keepdim=True))


class _Squares(ShardFunction):
    """Squared deviations from the mean, with the gradient that holds where their sum is stationary.

    Leaving out the mean's gradient spares the sum of deviations, which are 0 or, beside infinities,
    nan.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, center: Tensor) -> Tensor:
        ctx.save_for_backward(x, center)
        deviation = x - center
        return (deviation * deviation.conj()).real if x.is_complex() else deviation * deviation

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, center = ctx.saved_tensors
        return 2 * grads[0] * (x - center), None


def _variance(
    input: DistTensor, dim: Any, unbiased: Any, correction: Any, keepdim: bool
) -> tuple[Tensor, Tensor]:
    """Return variance and mean over dimensions, from squared deviations, which do not cancel."""
    if isinstance(dim, bool):  # var(input, unbiased)
        dim, unbiased = None, dim
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    over = normalize_dims(dim, input.dim())
    count = product(input.shape[d] for d in over)
    # Of all elements, and of less than none, the gradients of torch do not fit the infinite values.
    infinite = count == correction > 1 and (dim is None or not input.dim())
    if _names_nothing(dim) or infinite or (count and not correction <= count):
        refuse(
            "var",
            f"dim={dim!r} with correction={correction} of {count} elements is not supported",
            input,
            way_out="Name the dimensions, and take no more correction than there are elements",
        )
    center = mean(input, over, keepdim=True)
    squares = _Squares.apply(to_accumulation_type(input.shard), to_accumulation_type(center.shard))
    block = DistTensor(squares, input.shape, input.cuts, input.grid)
    total = sum_of(block, over, keepdim)
    shard = total.shard / max(count - correction, 0)
    if not input.is_complex():
        shard = shard.to(input.dtype)
    variance = DistTensor(shard, total.shape, total.cuts, total.grid)
    return variance, reduction_result(input, center.shard, over, keepdim)


def _root(variance: Tensor) -> Tensor:
    """Return the square root, with a gradient of 0 where the variance is 0, as torch's std."""
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
