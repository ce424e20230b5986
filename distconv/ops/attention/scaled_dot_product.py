"""`scaled_dot_product_attention` of partitioned queries, keys and values.

Samples and heads are partitioned as in the largest operand, and queries as in the query. For
partitioned keys, `arrangement.py` chooses which operands are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.device.kinds import thresholds
from distconv.geometry.layout import (
    Box,
    Cuts,
    Shape,
    cuts_of_broadcast,
    cutting_axes,
    operand_cuts,
)
from distconv.grid.interface import Grid
from distconv.ops.attention.arrangement import Arrangement, Sizes, arrange, without
from distconv.ops.attention.blocks import as_planes, differentiable, numbers, with_rows
from distconv.ops.attention.ring import BlockwiseAttention, Spec, record_tours
from distconv.ops.attention.schedule import Positions, Schedule
from distconv.ops.random import new_key
from distconv.ops.support.arguments import check_on_meta
from distconv.ops.support.merged import factors_of, fitting_factors, in_blocks, merge_as, unmerge
from distconv.ops.support.operands import (
    as_distributed,
    box_on_rank,
    broadcast_shape,
    check_same_types,
    common_grid,
    local_operand,
)
from distconv.tensor.dispatch import implements, refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import redistribute

NAME = "scaled_dot_product_attention"


@implements(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> DistTensor:
    """Return the attention of (..., L, E) queries to (..., S, E) keys. Collective.

    The result is partitioned as the query. Samples and heads that the query does not partition are
    partitioned as in key and value. The random numbers of dropout depend on positions alone, not on
    the grid.
    """
    grid = common_grid(NAME, (query, key, value, attn_mask))
    if is_causal and attn_mask is not None:
        reason = "a mask together with is_causal is not supported"
        refuse(NAME, reason, query, key, value, way_out="Leave it out")
    check_same_types(NAME, query, key, value)
    given = (query, key, value, attn_mask, 0.0, is_causal)
    shape = check_on_meta(F.scaled_dot_product_attention, *given, enable_gqa=enable_gqa)
    check_on_meta(F.dropout, query, dropout_p)
    grouped = enable_gqa and not query.shape[-3] == key.shape[-3] == value.shape[-3]
    if grouped:
        query, key, value, attn_mask = _in_groups(query, key, value, attn_mask)
    lead = tuple(torch.broadcast_shapes(*(t.shape[:-2] for t in (query, key, value))))
    _check_mask(attn_mask, (*lead, query.shape[-2], key.shape[-2]), query.dtype)
    if scale is None:
        scale = query.shape[-1] ** -0.5 if query.shape[-1] else 1.0
    how = dropout_p, is_causal, scale
    result = _attention((query, key, value), attn_mask, lead, grid, how, len(shape))
    return cast(DistTensor, result.reshape(shape)) if grouped else result


def _in_groups(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
    """Return q, k, v and mask with a new dimension for the heads of queries that share a key."""
    heads = q.shape[-3]
    if k.shape[-3] != v.shape[-3]:
        repeated = (t.repeat_interleave(heads // t.shape[-3], -3) for t in (k, v))
        return q, *repeated, mask
    groups = (k.shape[-3], heads // k.shape[-3])
    if mask is not None and mask.dim() > 2:
        mask = mask.unflatten(-3, groups if mask.shape[-3] == heads else (1, 1))
    return q.unflatten(-3, groups), k.unsqueeze(-3), v.unsqueeze(-3), mask


def _check_mask(mask: Tensor | None, full: Shape, dtype: torch.dtype) -> None:
    """Raise RuntimeError if `mask` does not broadcast to scores of shape `full`, or for its type.

    `dtype` is the type of the operands.
    """
    if mask is None:
        return
    fits = broadcast_shape(NAME, (torch.empty(full, device="meta"), mask)) == full
    if mask.dim() < 2 or not fits or mask.dtype not in (torch.bool, dtype):
        raise RuntimeError(
            f"{NAME}: a mask {tuple(mask.shape)} of {mask.dtype}; expected one of "
            f"bool or {dtype} that is broadcast to {full}"
        )


def _attention(
    given: Sequence[Tensor],
    mask: Tensor | None,
    lead: Shape,
    grid: Grid,
    how: tuple[float, bool, float],
    dims: int,
) -> DistTensor:
    """Return the attention of `given`, which are query, key and value. Collective.

    Parameters
    ----------
    lead: the shape of samples and heads, to which operands are broadcast.
    how: the probability of dropout, whether attention is causal, and the factor of products.
    dims: the number of dimensions of the operands in the program.
    """
    p, causal, scale = how
    given = [as_distributed(t, grid) for t in given]
    query, key, value = given
    batch = fitting_factors([factors_of(t)[:-2] for t in given], lead)
    split = fitting_factors([factors_of(t)[-2:-1] for t in (key, value)], key.shape[-2:-1])
    if batch is None or split is None:
        given = [as_distributed(in_blocks(t), grid) for t in given]
        batch, split = tuple((n,) for n in lead), ((key.shape[-2],),)
    samples, rows, columns = tuple(chain.from_iterable(batch)), factors_of(given[0])[-2], split[0]
    q, k, v = (
        as_distributed(unmerge(t, (*batch, run, (t.shape[-1],))), grid)
        for t, run in zip(given, (rows, columns, columns), strict=True)
    )
    sizes, base = partition(q, k, v, samples, rows, columns)
    smallest = thresholds(grid.computes_on_gpu).gathered_attention
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    made = arrange(grid.topology, sizes, base, causal, recorded, smallest)
    operands = [
        _placed(x, (*samples, *run, x.shape[-1]), (*made.batch, *cuts, ()), grid)
        for x, run, cuts in (
            (q, rows, made.rows),
            (k, columns, made.columns),
            (v, columns, made.columns),
        )
    ]
    schedule = Schedule(grid.topology, grid.rank, made, sizes, causal)
    if mask is not None:
        own = ((),) * len(columns) if schedule.ring else made.columns
        apart = unmerge(mask, (*batch, rows, columns))
        cuts = (*made.batch, *made.rows, *own)
        operands.append(_placed(apart, (*samples, *rows, *columns), cuts, grid))
    spec = Spec(grid, schedule, scale, p, new_key(grid) if p else None, grid.computes_on_gpu)
    cuts = (*made.batch, *made.rows, ())
    full = (*samples, *rows, value.shape[-1])
    block = box_on_rank(full, cuts, grid).shape
    result = DistTensor(_on_block(spec, operands, block, dims).reshape(block), full, cuts, grid)
    back = redistribute(result, (*base.batch, *base.rows, ()), NAME)
    return cast(DistTensor, merge_as(back, (*lead, query.shape[-2], value.shape[-1])))


class _Place(NamedTuple):
    """The global shape of an operand, and the grid axes that partition each dimension."""

    shape: Shape
    cuts: Cuts

    def gathered(self, block: Tensor, dims: slice, grid: Grid) -> Tensor:
        """Return the operand, gathered along `dims`. Collective.

        `block` is this rank's block.
        """
        cuts = list(self.cuts)
        cuts[dims] = [()] * len(cuts[dims])
        own = block.reshape(box_on_rank(self.shape, self.cuts, grid).shape)
        x = DistTensor(own, self.shape, self.cuts, grid)
        return redistribute(x, tuple(cuts), NAME).shard


def _placed(x: Tensor, shape: Shape, cuts: Cuts, grid: Grid) -> tuple[Tensor, _Place]:
    """Return this rank's block of `x`, broadcast to `shape` partitioned by `cuts`, and its place.

    Collective. Dimensions of size 1 in `x` are not expanded.
    """
    own = tuple(x.shape)
    block = local_operand(x, shape, cuts, grid, NAME)
    return block, _Place(own, operand_cuts(own, shape, cuts))


def partition(
    q: DistTensor, k: DistTensor, v: DistTensor, samples: Shape, rows: Shape, columns: Shape
) -> tuple[Sizes, Arrangement]:
    """Return the global sizes of attention, and the partition of samples, queries and keys.

    The dimensions of `q` are `samples`, `rows` and features; those of `k` and `v` are `samples`,
    `columns` and features. Dimensions of samples may be missing or have size 1.
    """
    leads = [x.dim() - 1 - len(run) for x, run in ((q, rows), (k, columns), (v, columns))]
    placed = tuple((tuple(x.shape[:n]), x.cuts[:n]) for x, n in zip((q, k, v), leads, strict=True))
    batch = cuts_of_broadcast(placed, samples)
    own, *others = (x.cuts[n:-1] for x, n in zip((q, k, v), leads, strict=True))
    keys = next((cuts for cuts in others if any(cuts)), others[0])
    shared = tuple(
        all(d > len(shape) or shape[-d] == 1 for shape, _ in placed[1:])
        for d in range(len(samples), 0, -1)
    )
    sizes = Sizes(samples, shared, rows, columns, (q.shape[-1], v.shape[-1]))
    used = cutting_axes(batch)
    return sizes, Arrangement(batch, without(own, used), without(keys, used))


def _on_block(spec: Spec, operands: list[tuple[Tensor, _Place]], block: Shape, dims: int) -> Tensor:
    """Return the attention of this rank's queries, (..., R, V). Collective.

    Parameters
    ----------
    operands: blocks and places of q, k, v, and perhaps a mask. The list is emptied, so that blocks
        of which contiguous copies are made are freed.
    block: the shape of this rank's block of the result.
    dims: the number of dimensions of the operands in the program.
    """
    schedule, cuts = spec.schedule, spec.schedule.arrangement
    rows, columns = len(cuts.rows), len(cuts.columns)
    q, k, v = (
        x.flatten(-1 - n, -2) for (x, _), n in zip(operands, (rows, columns, columns), strict=False)
    )
    mask: Tensor | None = None
    if operands[3:]:
        mask = operands[3][0].flatten(-columns - rows, -1 - columns)
    places = [place for _, place in operands]
    operands.clear()
    dense = schedule.causal and any(cuts.rows)
    if any(cuts.columns) or spec.p or (dense and not spec.accelerated):
        record_tours(spec, NAME, q, k, v)
        again = partial(_twice_differentiable, spec, places)
        result: Tensor = BlockwiseAttention.apply(q, k, v, mask, spec, again)
        return result
    if 0 in block:
        # The result depends on all operands in the graph, as on ranks that have elements.
        added = [] if mask is None or mask.dtype == torch.bool else [mask]
        return torch.stack([t.sum() for t in (q, k, v, *added)]).sum().expand(block)
    if mask is not None:
        mask = mask.flatten(-columns)
    elif dense:
        own, keys = schedule.rows(schedule.rank), schedule.columns(schedule.rank)
        mask = numbers(own, q.device).unsqueeze(-1) >= numbers(keys, q.device)
    batch = block[: len(block) - rows - 1]
    if len(batch) + 2 > max(dims, 4):  # torch's kernels are for four dimensions
        q = as_planes(q, batch)
        k = as_planes(k, batch)
        v = as_planes(v, batch)
        mask = as_planes(mask, batch) if mask is not None and mask.dim() > 2 else mask
    else:
        q = with_rows(q.expand((*batch, *q.shape[-2:])))
        k = with_rows(k.expand((*batch, *k.shape[-2:])))
        v = with_rows(v.expand((*batch, *v.shape[-2:])))
    causal = schedule.causal and not dense
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=spec.scale)


def _twice_differentiable(
    spec: Spec, places: Sequence[_Place], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> Tensor:
    """Return this rank's block of the attention, which can be differentiated twice. Collective.

    All keys are gathered. q, k, v and `mask` are this rank's blocks of the operands at `places`.
    """
    schedule, sizes = spec.schedule, spec.schedule.sizes
    n = len(sizes.columns)
    k, v = (
        place.gathered(block, slice(-1 - n, -1), spec.grid).flatten(-1 - n, -2)
        for place, block in zip(places[1:3], (k, v), strict=True)
    )
    if mask is not None:
        whole = places[3].gathered(mask, slice(-n, None), spec.grid)
        mask = whole.flatten(-n - len(sizes.rows), -1 - n).flatten(-n)
    keys = Positions(Box((0,) * n, sizes.columns), sizes.columns)
    return differentiable(q, k, v, spec.pair(schedule.rows(schedule.rank), keys, mask))
