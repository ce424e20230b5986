"""Mean and variance over dimensions that may be cut, and standardisation by them.

Each rank's mean and sum of squared deviations are combined by the pairwise update of Chan, Golub
and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979),
which does not cancel as E[x^2] - E[x]^2 does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from distconv.comm.collectives import all_gather, all_reduce
from distconv.comm.packing import fills_channels_last, has_channels_last
from distconv.comm.shard_function import ShardFunction
from distconv.geometry.layout import rank_box
from distconv.grid.interface import Grid
from distconv.ops.support.constants import remembered
from distconv.ops.support.first_order import first_order
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
    local = _variances_and_means(x, over, grid.computes_on_gpu)
    if not group:
        return local[1], local[0]
    return _of_all(all_gather(local, grid, group), counts)


def _of_all(parts: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return mean and variance of all elements, from variances and means (parts, 2, channels) of
    parts with so many each.
    """
    variances, means = parts.unbind(1)
    share = _share(parts.device, tuple(counts), parts.dtype)
    mean = (share * means).sum(0)
    deviations = means - mean
    return mean, (share * variances.addcmul_(deviations, deviations)).sum(0)


@remembered
def _share(device: torch.device, counts: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the share of all elements that each part has, to multiply its moments by."""
    numbers = torch.tensor(counts, dtype=torch.float64, device=device) / max(sum(counts), 1)
    return numbers.to(dtype).view(-1, 1)


def _variances_and_means(x: Tensor, over: Sequence[int], on_gpu: bool) -> Tensor:
    """Return variance and mean of this rank's elements, flat along the dimensions that are kept."""
    if not x.numel():
        kept = prod(n for d, n in enumerate(x.shape) if d not in over)
        return x.new_zeros((2, kept), dtype=accumulation_type(x.dtype))
    first = next((d for d in range(x.dim()) if d not in over), None)
    of_channels = first == 1 and len(over) == x.dim() - 1
    if of_channels and not on_gpu and _sums_fast(x):
        return _variance_and_mean_of_channels(x)
    if x.numel() <= _PIECE or on_gpu or first is None:
        return _variance_and_mean(x, over, on_gpu).flatten(1)
    # In pieces, whose differences from the mean fit into memory that is used again.
    if of_channels and has_channels_last(x):
        return _variance_and_mean_by_rows(x, over).flatten(1)
    pieces = [_variance_and_mean(piece, over, False) for piece in _pieces(x, first)]
    return torch.cat(pieces, first + 1).flatten(1)


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


_MANY_CHANNELS = 32
"""Channels from which torch was measured to add up each faster, where they are last in memory."""


def _sums_fast(x: Tensor) -> bool:
    return x.shape[1] >= _MANY_CHANNELS and fills_channels_last(x)


def _variance_and_mean_of_channels(x: Tensor) -> Tensor:
    """Return variance and mean of each channel without memory of the size of the block."""
    pieces = list(pieces_to_add_up(x)) if adds_up_too_many(x) else [x]
    parts = [_variance_and_mean_of_piece(to_accumulation_type(p)) for p in pieces]
    if len(parts) == 1:
        return parts[0]
    mean, variance = _of_all(torch.stack(parts), [p.numel() for p in pieces])
    return torch.stack([variance, mean])


def _variance_and_mean_of_piece(x: Tensor) -> Tensor:
    """Return the variance by torch's batch norm, and the mean.

    Batch norm adds up positions one by one, so that its own mean may be off by 3e-6. That hardly
    changes the variance of these elements, but it does change their distance from those of others.
    """
    _, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
    return torch.stack([variance, x.mean((0, *range(2, x.dim())))])


def _of_meta_tensor(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[1]), x.new_empty(x.shape[1])


_LIBRARY = torch.library.Library("aten", "IMPL")
"""Holds what torch (up to 2.13) has no function for: statistics of tensors without elements."""
if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::batch_norm_update_stats", "Meta"):
    _LIBRARY.impl("batch_norm_update_stats", _of_meta_tensor, "Meta")

_ADDED_UP = 2**18
"""Elements of a block with channels last up to which torch's sums are right to 1e-5: it adds up all
positions one by one in the type of the statistics."""


def adds_up_too_many(x: Tensor) -> bool:
    """Return whether sums by torch's batch norm are to be added up from those of pieces."""
    return x.numel() > _ADDED_UP and not x.is_cuda and has_channels_last(x)


def pieces_to_add_up(x: Tensor) -> Iterator[Tensor]:
    """Yield runs of samples, or of rows of one sample, that are small enough for that."""
    for some in x.split(max(1, _ADDED_UP * x.shape[0] // x.numel())):
        yield from some.split(max(1, _ADDED_UP * x.shape[2] // some.numel()), 2)


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
    @first_order("instance_norm, group_norm or layer_norm")
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
