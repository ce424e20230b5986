"""Mean and variance over dimensions that may be cut.

Means and variances of runs, and of ranks, are combined by the pairwise update of Chan, Golub
and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979),
which does not cancel as E[x^2] - E[x]^2 does.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from distconv.comm.collectives import all_gather
from distconv.geometry.layout import rank_box
from distconv.grid.interface import Grid
from distconv.ops.norm.form import Form, rows_if_small, runs_of
from distconv.ops.support.constants import remembered
from distconv.ops.support.operands import Placement
from distconv.ops.support.types import to_accumulation_type


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
    x: Tensor, form: Form, grid: Grid, group: tuple[str, ...], counts: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance (samples, groups), in float64.

    They are taken over the block `x` in the dimensions of `form`, and over the ranks along `group`,
    which all call it; `counts` tells how many elements a statistic takes on each of the ranks.
    """
    if x.numel():
        means, variances = _of_runs(x, form)
        parts = _of_all(means, variances, None, (1, 3, 4))
    else:
        samples = x.shape[0] if form.of_each_sample else 1
        parts = (x.new_zeros((samples, form.groups), dtype=torch.float64),) * 2
    if group:
        gathered = all_gather(torch.stack(parts), grid, group)
        shares = _shares(gathered.device, counts)
        parts = _of_all(gathered[:, 0], gathered[:, 1], shares, (0,))
    return parts


def _of_all(
    means: Tensor, variances: Tensor, shares: Tensor | None, over: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return mean and variance of all elements from those of parts along dimensions.

    `shares` are the shares of all elements that the parts have; None where they are equal.
    """

    def mean(t: Tensor) -> Tensor:
        return t.mean(over, True) if shares is None else (t * shares).sum(over, True)

    center = mean(means)
    variance = mean((means - center).square_().add_(variances))
    return center.squeeze(over), variance.squeeze(over)


@remembered
def _shares(device: torch.device, counts: tuple[int, ...]) -> Tensor:
    """Return the share of all elements that each rank has, to multiply (ranks, ., .) by."""
    numbers = torch.tensor(counts, dtype=torch.float64, device=device) / max(sum(counts), 1)
    return numbers.view(-1, 1, 1)


def _of_runs(x: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each run of a block, as `Runs.collect` does."""
    x = rows_if_small(x, form)
    runs = runs_of(x, form)
    wide = runs.of(to_accumulation_type(x))
    if not x.is_cpu:
        variance, mean = torch.var_mean(wide, 1 if runs.last else 3, correction=0)
    elif runs.last:
        parts = [torch.batch_norm_update_stats(m, None, None, 0.0) for m in wide.unbind()]
        mean, variance = (torch.stack(p) for p in zip(*parts, strict=True))
    else:
        # torch.var_mean takes thirty times as long on CPUs.
        mean = wide.mean(3, keepdim=True)
        pieces = zip(
            *(t.split(max(1, _PIECE // wide.shape[3]), 2) for t in (wide, mean)), strict=True
        )
        squares = [torch.ops.aten.mse_loss(*piece, 0).sum(3) for piece in pieces]
        variance = torch.cat(squares, 2) / wide.shape[3]
    return runs.collect(mean), runs.collect(variance)


_PIECE = 2**18
"""Elements at once: fresh memory of the size of an activation costs more than the arithmetic."""
