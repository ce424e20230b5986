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
from distconv.ops.norm.form import Form, by_groups, rows_if_small, runs_of
from distconv.ops.support.constants import remembered
from distconv.ops.support.operands import Placement, accumulation_type, to_accumulation_type


@lru_cache(maxsize=4096)
def element_counts_of_peers(
    x: Placement, over: tuple[int, ...], group: tuple[str, ...], block: int = 1
) -> tuple[int, ...]:
    """Return the number of elements of one statistic on each rank along `group`, in rank order.

    A statistic covers the dimensions `over` of `x`; if channels are not among them, it covers
    `block` channels.
    """
    peers = x.topology.peers(x.rank, group)
    boxes = (rank_box(x.shape, x.cuts, x.topology, peer).shape for peer in peers)
    return tuple(block * prod(box[d] for d in over) for box in boxes)


def moments(
    x: Tensor, form: Form, grid: Grid, group: tuple[str, ...], counts: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance, (samples, groups), in `accumulation_type`.

    They are over the block `x`, in the dimensions that `form` gives, and over the blocks of all
    ranks along `group`, which call it together. `counts` are the numbers of elements of a statistic
    on these ranks.
    """
    if x.numel():
        own = _of_block(x, form)
    else:
        samples = x.shape[0] if form.of_each_sample else 1
        own = x.new_zeros((2, samples, form.groups), dtype=accumulation_type(x.dtype))
    return combined(own, grid, group, counts)


def combined(
    own: Tensor, grid: Grid, group: tuple[str, ...], counts: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance over the elements of all ranks along `group`, which call it.

    `own` holds mean and variance of this rank's elements, (2, ...), or zeros on a rank without
    elements. `counts` are the numbers of elements of a statistic on these ranks.
    """
    if not group:
        mean, variance = own.unbind()
        return mean, variance
    parts = all_gather(own, grid, group)
    means, variances = parts.unbind(1)
    if min(counts) == max(counts):
        return _of_equal_parts(means, variances, (0,))
    shares = _shares(parts.device, counts, parts.dtype).view(-1, *(1,) * (means.dim() - 1))
    mean = (means * shares).sum(0)
    return mean, (means - mean).square_().add_(variances).mul_(shares).sum(0)


def _of_equal_parts(
    means: Tensor, variances: Tensor, over: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return mean and variance of the union of parts that have equal numbers of elements.

    `means` and `variances` are those of the parts, which lie along the dimensions `over`.
    """
    between, mean = torch.var_mean(means, over, correction=0)
    return mean, between.add_(variances.mean(over))


@remembered
def _shares(device: torch.device, counts: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return each rank's fraction of all elements."""
    numbers = torch.tensor(counts, dtype=torch.float64, device=device) / max(sum(counts), 1)
    return numbers.to(dtype)


def _of_block(x: Tensor, form: Form) -> Tensor:
    """Return mean and biased variance of a block, as (2, samples, groups)."""
    x = by_groups(to_accumulation_type(rows_if_small(x, form)), form)
    runs = runs_of(x, form)
    parts = runs.collect([_of_runs(part) for part in runs.calls(x)])
    if prod(runs.numbers) == runs.numbers[0] * form.groups:
        return parts.flatten(2)
    means, variances = parts.unbind()
    return torch.stack(_of_equal_parts(means, variances, (1, 3, 4)))


def _of_runs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each run, which is a channel of `x`."""
    over = (0, *range(2, x.dim()))
    if not x.is_cpu:  # torch has no meta kernel for the following functions
        variance, mean = torch.var_mean(x, over, correction=0)
        return mean, variance
    if x.stride(1) == 1 or x.numel() <= _LITTLE:
        mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
        return mean, variance
    # torch.var_mean takes thirty times as long on CPUs.
    mean = x.mean(over, keepdim=True)
    if x.numel() <= _PIECE:
        return mean.flatten(), torch.ops.aten.mse_loss(x, mean, 0).mean(over)
    pieces = (t.split(max(1, _PIECE * x.shape[1] // x.numel()), 1) for t in (x, mean))
    squares = [torch.ops.aten.mse_loss(*piece, 0).mean(over) for piece in zip(*pieces, strict=True)]
    return mean.flatten(), torch.cat(squares)


_LITTLE = 2**14
"""Elements below which one call is faster than three, although it is slow for rows."""

_PIECE = 2**18
"""Elements processed at once: fresh memory of an activation's size costs more than arithmetic."""
