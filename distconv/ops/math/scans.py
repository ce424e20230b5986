"""Cumulative functions along a dimension: each rank scans its block, and ranks gather totals.

Along a partitioned dimension, each rank scans its own block. The ranks gather the totals of the
blocks, of size 1 along the dimension, and each rank combines its results with the totals of earlier
blocks. This is the scan of Blelloch, "Prefix Sums and Their Applications" (1990), with one block
for each rank.
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
    if input.is_complex():  # torch's functions differ in branches of the logarithm
        check_on_meta(torch.logcumsumexp, input, dim)
        d = normalize_dim(dim, input.dim())
        return apply_along(torch.logcumsumexp, "logcumsumexp", input, [d], d)
    made: DistTensor = _scan(torch.logcumsumexp, _logcumsumexp, input, dim)
    return made


@implements(torch.cummax, torch.Tensor.cummax)
def cummax(input: DistTensor, dim: int) -> Any:
    """Return the running maxima and global positions, the last of equal maxima. Collective."""
    return _scan(torch.cummax, partial(_extrema, torch.cummax, torch.ge), input, dim)


@implements(torch.cummin, torch.Tensor.cummin)
def cummin(input: DistTensor, dim: int) -> Any:
    """Return the running minima and global positions, the last of equal minima. Collective."""
    return _scan(torch.cummin, partial(_extrema, torch.cummin, torch.le), input, dim)


implements_in_place(torch.Tensor.cumsum_, cumsum)
implements_in_place(torch.Tensor.cumprod_, cumprod)


def _scan(
    function: Callable[..., Any], over_ranks: Any, input: DistTensor, dim: int, **options: Any
) -> Any:
    """Return the result of torch's `function`, such as torch.cumsum, along `dim`. Collective.

    If `dim` is partitioned, `over_ranks(block, d, input, **options)` returns this rank's block of
    the result.
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
    if kind.is_complex:  # add_ multiplies by 1 + 0j, which would put a nan of one part into both
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
    # The scan begins with the product of the earlier blocks. If that is 0, and a scan of the block
    # alone overflowed to inf, their product would be nan.
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
    """Return this rank's block of running extrema of `input` and of their global positions.

    `scan` is torch.cummax or torch.cummin. `wins(value, earlier)` returns whether a value replaces
    an earlier extremum. `x` is this rank's block. Collective over the ranks along dimension `d`.
    """
    own, places = scan(x, d)
    places = places + input.box.start[d]
    if x.shape[d]:
        total, place = own.narrow(d, -1, 1), places.narrow(d, -1, 1)
    else:  # a sum of the empty block, to which gradients flow, unlike an empty scan
        total, place = (t.sum(d, True).to(t.dtype) for t in (x, places))
    totals, positions = _earlier(total, d, input), _earlier(place, d, input)
    if not len(totals):
        everywhere = torch.ones_like(own, dtype=torch.bool)
        return torch.where(everywhere, own, totals.sum(0).to(own.dtype)), places
    # The scan over the blocks chooses the same of equal extremes as a scan over all elements.
    before, block = (t[-1] for t in scan(totals, 0))
    position = positions.gather(0, block[None])[0]
    stays = wins(own, before) | own.isnan()
    return torch.where(stays, own, before), torch.where(stays, places, position)


def _earlier(total: Tensor, d: int, input: DistTensor) -> Tensor:
    """Return the totals of the blocks before this rank's block along dimension `d`, stacked.

    `total` is the total of this rank's block. Differentiable. Collective over the ranks along `d`.
    Each result must take part in the autograd graph, even if it is empty, so that all ranks take
    part in the backward message.
    """
    axes, topology = input.cuts[d], input.grid.topology
    totals = all_gather_with_grad(total, input.grid, axes)
    return totals[: topology.part(topology.coordinates(input.grid.rank), axes)]


def _default_type(x: Tensor) -> torch.dtype:
    """Return torch's default type for sums and products of elements of `x`: int64 for integers."""
    return x.dtype if x.is_floating_point() or x.is_complex() else torch.int64
