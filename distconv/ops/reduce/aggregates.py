"""torch.all and torch.any, variances, and logarithms of sums of exponentials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod as product
from typing import Any

import torch
from torch import Tensor

from distconv.comm.collectives import all_gather_with_grad, all_reduce_with_grad
from distconv.comm.shard_function import ShardFunction
from distconv.geometry.layout import cutting_axes
from distconv.grid.interface import Grid
from distconv.ops.norm.moments import combined, element_counts_of_peers
from distconv.ops.reduce.extrema import extreme
from distconv.ops.reduce.sums import Dims, reduction_result
from distconv.ops.reduce.sums import sum as sum_of
from distconv.ops.support.argument_forms import normalize_dims
from distconv.ops.support.memory_format import reduce_in_order_of_memory
from distconv.ops.support.merged import works_along
from distconv.ops.support.operands import Placement, to_accumulation_type
from distconv.tensor.dispatch import implements, refuse
from distconv.tensor.dist_tensor import DistTensor


def _is_empty_sequence(dim: Any) -> bool:
    """Return whether `dim` is an empty sequence, by which some functions reduce no dimension."""
    return isinstance(dim, Sequence) and not dim


@implements(torch.logsumexp, torch.Tensor.logsumexp, torch.special.logsumexp)
@works_along(reduces=True)
def logsumexp(input: DistTensor, dim: Dims, keepdim: bool = False) -> DistTensor:
    if _is_empty_sequence(dim) and input.dim():
        raise RuntimeError("logsumexp: dim names no dimension; expected at least one")
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
    """Register the rule of `function`, torch.all or torch.any, and of the method of that name."""

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
    """Mean and biased variance over dimensions, by one message each way.

    As in torch, the gradient of the variance leaves out the term with the sum of x - mean. This sum
    is 0, or nan if an element is infinite.
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
    """Return variance and mean over dimensions, from squared deviations, which do not cancel."""
    if isinstance(dim, bool):  # var(input, unbiased)
        dim, unbiased = None, dim
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    over = normalize_dims(dim, input.dim())
    count = product(input.shape[d] for d in over)
    # torch's gradients over all elements, and over no elements, do not fit the infinite values.
    infinite = count == correction > 1 and (dim is None or not input.dim())
    if _is_empty_sequence(dim) or infinite or (count and not correction <= count):
        reason = f"dim={dim!r} with correction={correction} of {count} elements is not supported"
        way_out = "Name the dimensions, and take no more correction than there are elements"
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
    """Return the square root, with gradient 0 where the variance is 0, as in torch.std."""
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
