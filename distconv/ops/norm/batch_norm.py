"""Batch normalisation with statistics over the whole mini-batch, or over a part of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.device.thresholds import on_accelerator, thresholds
from distconv.geometry.layout import cutting_axes
from distconv.ops.norm.form import Form, with_batch_stride
from distconv.ops.norm.moments import element_counts_of_peers
from distconv.ops.norm.normalize import normalize
from distconv.ops.norm.running import RunningStatistics
from distconv.ops.support.merged import works_on_channels
from distconv.ops.support.operands import (
    Placement,
    as_distributed,
    common_grid,
    gather_whole,
    in_type,
    local_operand,
)
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor
from distconv.torch_private import without_modes

SPATIAL = ("depth", "height", "width")
Kind: TypeAlias = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor."""


def batch_norm_over(
    axes: tuple[str, ...] | None,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> DistTensor:
    """Normalise a batch by statistics over the ranks that differ from this one along `axes`.

    All ranks call it. If `axes` is None, these are all axes that cut the input: statistics are over
    the global batch. With fewer axes each group of ranks has statistics of its own; the running
    statistics take their mean over the groups, and so stay the same on every rank.
    """
    channelwise = running_mean, running_var, weight, bias
    grid = common_grid("batch_norm", (input, *channelwise))
    x = as_distributed(input, grid)
    kinds = tuple([None if t is None else (t.shape, t.dtype) for t in channelwise])
    options = training, momentum is None, eps
    training, group, rest, counts, groups = _decide(
        Placement.of(x), axes, grid.device, *options, kinds
    )
    running = running_mean, running_var
    if any(x.cuts[1:2]) or any([isinstance(t, DistTensor) for t in channelwise]):
        running_mean, running_var, weight, bias = (
            own_channels(t, x, "batch_norm") for t in channelwise
        )
        if running_mean is not None and running_var is not None:
            # The backward pass needs their current values.
            running_mean, running_var = running_mean.clone(), running_var.clone()
    block = with_batch_stride(x.shard)
    most = thresholds(on_accelerator(block, grid.computes_on_gpu)).own_batch_norm
    if not training or not (group or rest or block.numel() > most):
        if block.numel() or not x.numel():
            shard = F.batch_norm(
                block, running_mean, running_var, weight, bias, training, momentum, eps
            )
        else:
            shard = _without_elements(block, weight, bias)
        if training:
            gather_running_statistics(x, running, (running_mean, running_var), "batch_norm")
        return DistTensor(shard, x.shape, x.cuts, grid)

    tracked = None
    if running_mean is not None and running_var is not None:
        own = running_mean, running_var
        publish = partial(gather_running_statistics, x, running, own, "batch_norm")
        tracked = RunningStatistics(*own, momentum, sum(counts), grid, rest, groups, publish)
    form = Form(block.shape[1], of_each_sample=False)
    shard = normalize(block, weight, bias, form, grid, group, counts, eps, tracked)
    return DistTensor(shard, x.shape, x.cuts, grid)


implements(F.batch_norm)(works_on_channels(of_each_sample=False)(partial(batch_norm_over, None)))


class _Statistics(NamedTuple):
    """The ranks and elements of the statistics of one call of batch norm, found by `_decide`."""

    training: bool
    """Whether the batch's own statistics are used; torch uses none for an empty batch."""
    group: tuple[str, ...]
    """The grid axes over which the statistics are taken."""
    rest: tuple[str, ...]
    """Other axes that cut the input."""
    counts: tuple[int, ...]
    """Elements of each channel on each rank along `group`."""
    groups: int
    """The number of groups of ranks that have elements, and so statistics."""


@lru_cache(maxsize=4096)
def _decide(
    x: Placement,
    axes: tuple[str, ...] | None,
    device: torch.device,
    training: bool,
    without_momentum: bool,
    eps: float,
    kinds: tuple[Kind | None, ...],
) -> _Statistics:
    elements = prod(x.shape)
    if len(x.shape) < 2 and elements:
        raise ValueError(f"batch_norm: expected at least 2 dimensions, got {len(x.shape)}")
    cutting = cutting_axes((x.cuts[0], *x.cuts[2:]))
    group = cutting if axes is None else tuple(a for a in cutting if a in axes)
    smallest, groups = _groups_with_elements(x, group)
    if training and smallest == 1:
        raise ValueError(
            "batch_norm: expected more than 1 value per channel when training, got input size "
            f"{x.shape}"
            + (
                f' with {smallest} in a group of ranks; use statistics="global"'
                if group != cutting
                else ""
            )
        )
    if elements:
        # torch's own checks of sizes and types, on two samples of the same channels.
        like = ((2, x.shape[1]), x.dtype), *kinds
        serial: Any = F.batch_norm
        with without_modes():  # as for `check_on_meta`
            ones = [k and torch.ones(k[0], dtype=k[1], device=device) for k in like]
            serial(*ones, training, None if without_momentum else 0.0, eps)
    rest = tuple(a for a in cutting if a not in group)
    counts = element_counts_of_peers(x, (0, *range(2, len(x.shape))), group)
    return _Statistics(training and elements > 0, group, rest, counts, groups)


def own_channels(values: Any, x: DistTensor, operator: str) -> Any:
    """Return the part of `values` that belongs to this rank's channels of `x`; None for None.

    `values` has one number for each channel, and is distributed or equal on all ranks. `operator`
    is the name of the norm, under which a redistribution is recorded.
    """
    shape, cuts = tuple(x.shape[1:2]) or (0,), x.cuts[1:2] or ((),)
    return local_operand(values, shape, cuts, x.grid, operator)


def gather_running_statistics(
    x: DistTensor, running: Sequence[Tensor | None], own: Sequence[Tensor | None], operator: str
) -> None:
    """Copy `own`, each rank's updated statistics of its channels, to `running` on all ranks.

    Nothing is done for statistics that a rank has updated in place. `operator` is the name of the
    norm, under which the redistribution is recorded.
    """
    pairs = [
        (t, o)
        for t, o in zip(running, own, strict=True)
        if t is not None and o is not None and t is not o
    ]
    if not pairs:
        return
    shape = len(pairs), x.shape[1]
    with torch.no_grad():
        rows = DistTensor(torch.stack([o for _, o in pairs]), shape, ((), x.cuts[1]), x.grid)
        for (t, _), row in zip(pairs, gather_whole(rows, operator), strict=True):
            t.copy_(row)


def _without_elements(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return the result for a block without elements, which torch's batch norm refuses.

    It can be differentiated to any order.
    """
    weight, bias = (
        None if p is None else p.view(-1, *(1,) * (x.dim() - 2)) for p in (weight, bias)
    )
    y = x.clone() if weight is None else x * weight
    return in_type(y if bias is None else y + bias, x.dtype)


def _groups_with_elements(x: Placement, group: tuple[str, ...]) -> tuple[int, int]:
    """Return the fewest elements per channel in a group of ranks, and the number of groups.

    Ranks along the axes `group` form a group; groups without elements are left out. The numbers are
    the same on every rank.
    """
    sizes = [x.shape[0], *x.shape[2:]]
    cuts = [x.cuts[0], *x.cuts[2:]]
    apart = [x.topology.parts(a for a in axes if a not in group) for axes in cuts]
    filled = [min(n, parts) for n, parts in zip(sizes, apart, strict=True)]
    smallest = prod(n // max(parts, 1) for n, parts in zip(sizes, filled, strict=True))
    return smallest, prod(filled)
