"""Counts of elements: those not 0, those not nan, by value, and by interval.

Each rank counts in its own block, and the counts are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distconv.comm.collectives import all_reduce_with_grad
from distconv.geometry.layout import cutting_axes
from distconv.ops.reduce.extrema import extreme
from distconv.ops.reduce.sums import Dims, sum_by
from distconv.ops.support.merged import works_along
from distconv.ops.support.operands import common_grid, gather_whole, local_operand
from distconv.tensor.dispatch import implements, refuse
from distconv.tensor.dist_tensor import DistTensor


@implements(torch.count_nonzero, torch.Tensor.count_nonzero)
def count_nonzero(input: Tensor, dim: Dims = None) -> Tensor:
    """Return the number of elements along dimensions that are not 0."""
    present: Any = input.bool()
    counted: Tensor = present.sum(dim)
    return counted


@implements(torch.nansum, torch.Tensor.nansum)
@works_along(reduces=True)
def nansum(
    input: Any, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the sum over dimensions of the elements that are not nan."""
    _require_real("nansum", input)
    return sum_by(torch.nansum, input, dim, keepdim, dtype)


@implements(torch.nanmean, torch.Tensor.nanmean)
def nanmean(
    input: Any, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the mean over dimensions of the elements that are not nan."""
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


def _bounds(
    name: str, input: DistTensor, given: Sequence[float] | None, widening: float
) -> tuple[float, float]:
    """Return the interval to divide: `given`, or from the smallest to the largest element.

    An interval of length 0 is widened on both sides.
    """
    low, high = given or (0.0, 1.0 if name == "histogram" else 0.0)
    if given is None and input.numel():
        x = input.detach()
        low, high = (extreme(name, x, None, False, m).shard.item() for m in (False, True))
    if not (float("-inf") < low <= high < float("inf")):
        raise RuntimeError(
            f"{name}: the elements to be counted range from {low} to {high}; expected finite "
            "bounds, the lower one first"
        )
    return (low - widening, high + widening) if low == high else (low, high)


def _check_type(name: str, input: DistTensor) -> None:
    """Raise on every rank for a type that torch does not count, or not accurately enough."""
    kind = input.dtype
    if not kind.is_floating_point:
        raise NotImplementedError(f"{name}: not implemented for {kind}; convert it, x.double()")
    eps = torch.finfo(kind).eps
    if eps > 1e-4 and input.numel() > 2 / eps and cutting_axes(input.cuts):
        # torch stops counting where adding 1 changes nothing, and so would each rank.
        reason = f"{kind} does not hold all numbers up to {input.numel()}, the elements to count"
        refuse(name, reason, input, way_out="Convert it: x.float()")


@implements(torch.histc, torch.Tensor.histc)
def histc(input: DistTensor, bins: int = 100, min: float = 0, max: float = 0) -> DistTensor:
    """Return the number of elements in each of `bins` intervals of equal length."""
    _check_type("histc", input)
    if bins <= 0:
        raise RuntimeError(f"histc: bins={bins} is not positive")
    bounds = _bounds("histc", input, None if min == max else (min, max), 1)
    return _added(torch.histc(input.shard.detach(), bins, *bounds), input)


@implements(torch.histogram, torch.Tensor.histogram)
def histogram(
    input: DistTensor,
    bins: int | Tensor,
    *,
    range: Sequence[float] | None = None,
    weight: Tensor | None = None,
    density: bool = False,
) -> Any:
    """Return the number, or weight, of elements in each interval, and the intervals' bounds."""
    _check_type("histogram", input)
    if weight is not None and (weight.shape != input.shape or weight.dtype != input.dtype):
        raise RuntimeError(
            f"histogram: weights {tuple(weight.shape)} of {weight.dtype} for an input "
            f"{tuple(input.shape)} of {input.dtype}"
        )
    x = input.shard.detach()
    own = local_operand(weight, tuple(input.shape), input.cuts, input.grid, "histogram")
    options: Any = {} if own is None else {"weight": own.detach().contiguous().flatten()}
    if isinstance(bins, Tensor):
        if range is not None:
            raise TypeError("histogram: the bounds in bins and a range exclude each other")
        bins = gather_whole(bins, "histogram")
    else:
        options["range"] = _bounds("histogram", input, range, 0.5)
    found = torch.histogram(x.contiguous().flatten(), bins, **options)
    counts = _added(found.hist, input)
    if density:
        counts = counts / (counts.sum() * found.bin_edges.diff())  # type: ignore[assignment]
    edges = DistTensor(found.bin_edges, found.bin_edges.shape, ((),), input.grid)
    return type(found)((counts, edges))


@implements(torch.bincount, torch.Tensor.bincount)
def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> DistTensor:
    """Return the number, or weight, of each integer from 0 to the largest in a vector."""
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
