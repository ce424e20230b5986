"""Mean and variance over dimensions that may be cut, and standardisation by them.

Each rank's mean and sum of squared deviations are combined by the pairwise update of Chan, Golub
and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979),
which does not cancel as E[x^2] - E[x]^2 does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from distconv.comm.collectives import all_gather, all_reduce
from distconv.comm.packing import has_channels_last
from distconv.comm.shard_function import ShardFunction, first_order
from distconv.geometry.layout import rank_box
from distconv.grid.interface import Grid
from distconv.ops.support.constants import remembered
from distconv.ops.support.operands import Placement
from distconv.ops.support.types import accumulation_type, to_accumulation_type


@lru_cache(maxsize=4096)
def element_counts_of_peers(
    x: Placement, over: tuple[int, ...], group: tuple[str, ...], block: int = 1
) -> tuple[int, ...]:
    """Return how many elements of `x` a statistic takes on each rank along `group`, in rank order.

    `block` multiplies the extents along the dimensions `over`.
    """
    peers = x.topology.peers(x.rank, group)
    boxes = (rank_box(x.shape, x.cuts, x.topology, peer).shape for peer in peers)
    return tuple(block * prod(box[d] for d in over) for box in boxes)


def moments(
    x: Tensor, over: Sequence[int], grid: Grid, group: tuple[str, ...], counts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance over dimensions and over the ranks along `group`.

    Those ranks call it; `counts` tells how many elements each of them contributes. The results are
    flat, in the order of the other dimensions, in the type in which sums are accumulated.
    """
    local = _variances_and_means(x, over, grid.computes_on_gpu).flatten(1)
    if not group:
        return local[1], local[0]
    variances, means = all_gather(local, grid, group).unbind(1)
    share = _share(x.device, tuple(counts), local.dtype)
    mean = (share * means).sum(0)
    deviations = means - mean
    return mean, (share * variances.addcmul_(deviations, deviations)).sum(0)


@remembered
def _share(device: torch.device, counts: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the part of all elements that each rank contributes, to multiply its moments by."""
    numbers = torch.tensor(counts, dtype=torch.float64, device=device) / max(sum(counts), 1)
    return numbers.to(dtype).view(-1, 1)


def _variances_and_means(x: Tensor, over: Sequence[int], on_gpu: bool) -> Tensor:
    """Return variance and mean of this rank's elements, with one element along `over`."""
    if not x.numel():
        shape = [1 if d in over else n for d, n in enumerate(x.shape)]
        return x.new_zeros((2, *shape), dtype=accumulation_type(x.dtype))
    kept = next((d for d in range(x.dim()) if d not in over), None)
    if x.numel() <= _PIECE or on_gpu or kept is None:
        return _variance_and_mean(x, over, on_gpu)
    # In pieces, whose differences from the mean fit into memory that is used again.
    if has_channels_last(x) and kept == 1 and len(over) == x.dim() - 1:
        return _variance_and_mean_by_rows(x, over)
    return torch.cat(
        [_variance_and_mean(piece, over, False) for piece in _pieces(x, kept)], kept + 1
    )


_PIECE = 2**19
"""Elements at once: fresh memory of the size of an activation costs more than the arithmetic."""


def _pieces(x: Tensor, d: int) -> Sequence[Tensor]:
    return x.split(max(1, _PIECE * x.shape[d] // x.numel()), d)


def _variance_and_mean(x: Tensor, over: Sequence[int], on_gpu: bool) -> Tensor:
    """Return variance and mean in two stable passes.

    torch.var_mean takes ten times as long on CPUs.
    """
    wide = to_accumulation_type(x)
    if on_gpu:
        return torch.stack(torch.var_mean(wide, tuple(over), correction=0, keepdim=True))
    mean = wide.mean(tuple(over), keepdim=True)
    variance = (wide - mean).square_().mean(tuple(over), keepdim=True)
    return torch.stack([variance, mean])


def _variance_and_mean_by_rows(x: Tensor, over: Sequence[int]) -> Tensor:
    """Return the same of a block with channels last, in which pieces of all channels are runs."""
    mean = x.mean(tuple(over), keepdim=True, dtype=accumulation_type(x.dtype))
    squares = [
        (to_accumulation_type(piece) - mean).square_().sum(tuple(over), keepdim=True)
        for piece in _pieces(x, 2)
    ]
    return torch.stack([torch.stack(squares).sum(0) / (x.numel() // x.shape[1]), mean])


class Standardize(ShardFunction):
    """(x - mean) / sqrt(variance + eps), with the moments over dimensions and ranks.

    Returns the result, and mean and variance in the type in which they are accumulated.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        over: tuple[int, ...],
        grid: Grid,
        group: tuple[str, ...],
        counts: tuple[int, ...],
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = to_accumulation_type(x)
        kept = [1 if d in over else n for d, n in enumerate(x.shape)]
        mean, variance = (m.view(kept) for m in moments(x, over, grid, group, counts))
        scale = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, mean, scale)
        ctx.context = over, grid, group, sum(counts)
        ctx.mark_non_differentiable(mean, variance)
        return ((wide - mean) * scale).to(x.dtype), mean, variance

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, scale = ctx.saved_tensors
        over, grid, group, count = ctx.context
        dy = to_accumulation_type(grads[0])
        standard = (to_accumulation_type(x) - mean) * scale
        sums = torch.stack([dy.sum(over, keepdim=True), (dy * standard).sum(over, keepdim=True)])
        if group:
            sums = all_reduce(sums, grid, group)
        dx = scale * (dy - (sums[0] + standard * sums[1]) / count)
        return dx.to(x.dtype), None, None, None, None, None
