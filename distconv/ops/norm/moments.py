"""Mean and variance over dimensions that may be cut.

Means and variances of channels, and of ranks, are combined by the pairwise update of Chan, Golub
and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979),
which does not cancel as E[x^2] - E[x]^2 does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from distconv.comm.collectives import all_gather
from distconv.comm.packing import has_channels_last
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
    x: Tensor,
    over: tuple[int, ...],
    rows: tuple[int, int, int],
    grid: Grid,
    group: tuple[str, ...],
    counts: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance (samples, groups), in float64.

    They are taken over the dimensions `over` of the block `x`, over the channels of a group, and
    over the ranks along `group`, which all call it.

    Parameters
    ----------
    rows: samples, groups, and channels of a group: the sizes of the other dimensions.
    counts: the elements that a statistic takes on each of the ranks.
    """
    means, variances = _means_and_variances(x, over, grid.computes_on_gpu)
    parts = torch.stack([means, variances]).double().view(2, *rows)
    # A group of one channel is that channel.
    parts = parts.squeeze(3) if rows[2] == 1 else _of_all(parts, 1 / rows[2], -1)
    if group:
        gathered = all_gather(parts, grid, group).transpose(0, 1)
        parts = _of_all(gathered, _shares(parts.device, counts), 0)
    return parts[0], parts[1]


def _of_all(parts: Tensor, share: Tensor | float, along: int) -> Tensor:
    """Return mean and variance of all elements, (2, ...), from those of parts along a dimension.

    `share` is the share of all elements that each part has.
    """
    means, variances = parts
    mean = (means * share).sum(along, keepdim=True)
    variance = ((means - mean).square_().add_(variances) * share).sum(along)
    return torch.stack([mean.squeeze(along), variance])


@remembered
def _shares(device: torch.device, counts: tuple[int, ...]) -> Tensor:
    """Return the share of all elements that each rank has, to multiply (ranks, ., .) by."""
    numbers = torch.tensor(counts, dtype=torch.float64, device=device) / max(sum(counts), 1)
    return numbers.view(-1, 1, 1)


_PIECE = 2**18
"""Elements at once: fresh memory of the size of an activation costs more than the arithmetic."""


def _means_and_variances(x: Tensor, over: tuple[int, ...], on_gpu: bool) -> Sequence[Tensor]:
    """Return mean and variance of this rank's elements, flat, in two stable passes."""
    kind = accumulation_type(x.dtype)
    if not x.numel():
        kept = prod(n for d, n in enumerate(x.shape) if d not in over)
        return x.new_zeros((2, kept), dtype=kind).unbind()
    if on_gpu:
        variance, mean = torch.var_mean(to_accumulation_type(x), over, correction=0)
        return mean.flatten(), variance.flatten()
    # torch.var_mean takes thirty times as long on CPUs.
    mean = x.mean(over, keepdim=True, dtype=kind)
    along = 2 if has_channels_last(x) else 1
    length = max(1, _PIECE * x.shape[along] // x.numel())
    if length >= x.shape[along]:
        squares = _squares(x, mean, over)
    elif along == 2:
        squares = torch.stack([_squares(p, mean, over) for p in x.split(length, 2)]).sum(0)
    else:
        pieces = zip(x.split(length, 1), mean.split(length, 1), strict=True)
        squares = torch.cat([_squares(*piece, over) for piece in pieces], 1)
    return mean.flatten(), squares.flatten() / (x.numel() // mean.numel())


def _squares(x: Tensor, mean: Tensor, over: tuple[int, ...]) -> Tensor:
    """Return the sums of squared deviations from the mean."""
    return torch.ops.aten.mse_loss(x, mean, 0).sum(over, keepdim=True)
