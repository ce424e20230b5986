"""Cumulative functions along a dimension: each rank scans its block, and blocks exchange totals.

Along a partitioned dimension a rank's block continues those before it. A rank scans its own block,
all ranks gather the totals of the blocks (one element in place of each block), and each combines
its results with the totals of earlier blocks. This is the scan of Blelloch, "Prefix Sums and Their
Applications" (1990), with one block for each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distconv.comm.collectives import all_gather_with_grad
from distconv.ops.support.arguments import check_on_meta, normalize_dim
from distconv.ops.support.in_place import implements_in_place
from distconv.ops.support.operands import accumulation_type, apply_along
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor


@implements(torch.cumsum, torch.Tensor.cumsum)
def cumsum(input: DistTensor, dim: int, *, dtype: torch.dtype | None = None) -> DistTensor:
    made: DistTensor = _scan(torch.cumsum, _cumsum, input, dim, dtype=dtype)
    return made


@implements(torch.cumprod, torch.Tensor.cumprod)
def cumprod(input: DistTensor, dim: int, *, dtype: torch.dtype | None = None) -> DistTensor:
    made: DistTensor = _scan(torch.cumprod, _cumprod, input, dim, dtype=dtype)
    return made


@implements(torch.logcumsumexp, torch.Tensor.logcumsumexp)
def logcumsumexp(input: DistTensor, dim: int) -> DistTensor:
    if input.is_complex():  # whose logarithms torch adds by other branches in each function
        check_on_meta(torch.logcumsumexp, input, dim)
        d = normalize_dim(dim, input.dim())
        return apply_along(torch.logcumsumexp, "logcumsumexp", input, [d], d)
    made: DistTensor = _scan(torch.logcumsumexp, _logcumsumexp, input, dim)
    return made


@implements(torch.cummax, torch.Tensor.cummax)
def cummax(input: DistTensor, dim: int) -> Any:
    """Return the running maxima and their global positions; of equal ones the last counts."""
    return _scan(torch.cummax, partial(_extrema, torch.cummax, torch.ge), input, dim)


@implements(torch.cummin, torch.Tensor.cummin)
def cummin(input: DistTensor, dim: int) -> Any:
    """Return the running minima and their global positions; of equal ones the last counts."""
    return _scan(torch.cummin, partial(_extrema, torch.cummin, torch.le), input, dim)


implements_in_place(torch.Tensor.cumsum_, cumsum)
implements_in_place(torch.Tensor.cumprod_, cumprod)


def _scan(
    function: Callable[..., Any], over_ranks: Any, input: DistTensor, dim: int, **options: Any
) -> Any:
    """Return the results of torch's `function` along `dim`; all ranks call it.

    `over_ranks` computes them for a block (x, d, input, **options) along a partitioned dimension.
    """
    check_on_meta(function, input, dim, **options)
    d = normalize_dim(dim, input.dim())
    if input.dim() and input.cuts[d]:
        made = over_ranks(input.shard, d, input, **options)
    else:
        made = function(input.shard, d, **options)
    if isinstance(made, Tensor):
        return DistTensor(made, input.shape, input.cuts, input.grid)
    parts = [DistTensor(part, input.shape, input.cuts, input.grid) for part in made]
    return getattr(torch.return_types, function.__name__)(parts)


def _cumsum(x: Tensor, d: int, input: DistTensor, dtype: torch.dtype | None) -> Tensor:
    kind = dtype or _default_type(x)
    if kind.is_complex:  # whose addition multiplies by 1 + 0j, so that nan of one part is in both
        parts = torch.view_as_real(x.to(kind).resolve_conj())
        return torch.view_as_complex(_real_cumsum(parts, d, parts.dtype, input))
    return _real_cumsum(x, d, kind, input)


def _real_cumsum(x: Tensor, d: int, kind: torch.dtype, input: DistTensor) -> Tensor:
    own = x.cumsum(d, dtype=accumulation_type(kind))
    total = own.narrow(d, -1, 1) if x.shape[d] else x.sum(d, True, dtype=own.dtype)
    return own.add_(_earlier(total, d, input).sum(0)).to(kind)


def _cumprod(x: Tensor, d: int, input: DistTensor, dtype: torch.dtype | None) -> Tensor:
    kind = dtype or _default_type(x)
    x = x.to(accumulation_type(kind))
    # The product of a block may leave the range of the type where the serial result does not.
    wide = torch.float64 if x.dtype == torch.float32 else x.dtype
    before = _earlier(x.prod(d, True, dtype=wide), d, input).prod(0).to(x.dtype)
    # The scan begins with the serial result before the block, in which a zero is followed by inf.
    return torch.cat([before, x], d).cumprod(d).narrow(d, 1, x.shape[d]).to(kind)


def _logcumsumexp(x: Tensor, d: int, input: DistTensor) -> Tensor:
    own = x.to(accumulation_type(x.dtype)).logcumsumexp(d)
    total = own.narrow(d, -1, 1) if x.shape[d] else x.sum(d, True, dtype=own.dtype)
    before = _earlier(total, d, input)
    if not len(before):
        return (own + before.sum(0)).to(x.dtype)
    return torch.logaddexp(own, before.logsumexp(0)).to(x.dtype)


def _extrema(
    scan: Callable[..., Any], wins: Callable[..., Tensor], x: Tensor, d: int, input: DistTensor
) -> tuple[Tensor, Tensor]:
    """Return running extrema and their positions; a value `wins` over an earlier extreme one."""
    own, places = scan(x, d)
    places = places + input.box.start[d]
    if x.shape[d]:
        total, place = own.narrow(d, -1, 1), places.narrow(d, -1, 1)
    else:  # of the block, as the gradient of an empty scan depends on nothing
        total, place = (t.sum(d, True).to(t.dtype) for t in (x, places))
    totals, positions = _earlier(total, d, input), _earlier(place, d, input)
    if not len(totals):
        everywhere = torch.ones_like(own, dtype=torch.bool)
        return torch.where(everywhere, own, totals.sum(0).to(own.dtype)), places
    # The scan over the blocks chooses among equal extremes as that over elements does.
    before, block = (t[-1] for t in scan(totals, 0))
    position = positions.gather(0, block[None])[0]
    stays = wins(own, before) | own.isnan()
    return torch.where(stays, own, before), torch.where(stays, places, position)


def _earlier(total: Tensor, d: int, input: DistTensor) -> Tensor:
    """Return the totals of the blocks before this rank's along dimension `d`, stacked.

    Differentiable. All ranks call it, and give the result to autograd, also if it is empty.
    """
    axes, topology = input.cuts[d], input.grid.topology
    totals = all_gather_with_grad(total, input.grid, axes)
    return totals[: topology.part(topology.coordinates(input.grid.rank), axes)]


def _default_type(x: Tensor) -> torch.dtype:
    """Return the type of sums and products of elements of `x`."""
    return x.dtype if x.is_floating_point() or x.is_complex() else torch.int64
