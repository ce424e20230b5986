"""Elements picked by a mask, read and written where they lie.

Each rank picks in its own block. Elements that are read are made whole, as every rank must know how
many they are; nothing else moves. Elements that are written need not move at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from distconv.geometry.layout import Shape, cuts_of_broadcast
from distconv.ops.support.merged import factors_of, fitting_factors, merge_as, unmerge
from distconv.ops.support.operands import (
    as_distributed,
    broadcast_shape,
    common_grid,
    local_operand,
)
from distconv.ops.support.selected import Selection
from distconv.tensor.aliasing import finish_write
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor


def picked_by_mask(input: Tensor, mask: Tensor, operator: str) -> DistTensor:
    """Return the rows of `input` where `mask`, over its leading dimensions, is true.

    The result is (rows, *other dimensions), with all rows on every rank. Collective. `operator` is
    the called function, for errors and records.
    """
    check_mask(mask, tuple(input.shape[: mask.dim()]), input)
    grid = common_grid(operator, (input, mask))
    rest = input.shape[mask.dim() :]
    lead = tuple(mask.shape)
    runs = factors_of(input)
    factors = fitting_factors([runs[: mask.dim()], factors_of(mask)], lead)
    factors = factors or tuple((n,) for n in lead)
    x = as_distributed(unmerge(input, (*factors, *runs[mask.dim() :])), grid)
    chosen = as_distributed(unmerge(mask, factors), grid)
    behind = x.dim() - chosen.dim()
    shape = tuple(x.shape)
    cuts = cuts_of_broadcast(
        ((shape, x.cuts), ((*chosen.shape, *(1,) * behind), (*chosen.cuts, *((),) * behind))), shape
    )
    over, along = cuts[: chosen.dim()], cuts[chosen.dim() :]
    here = local_operand(chosen, shape[: chosen.dim()], over, grid, operator)
    selection = Selection(DistTensor(here, chosen.shape, over, grid), operator)
    rows = selection.bring(local_operand(x, shape, cuts, grid, operator)[here], along)
    made = DistTensor(rows, (selection.total, *shape[chosen.dim() :]), ((), *along), grid)
    return cast(DistTensor, merge_as(made, (selection.total, *rest)))


def assign_by_mask(input: DistTensor, first: int, mask: Tensor, value: Tensor) -> None:
    """Assign where a mask of the dimensions from `first` on is true; each rank writes to its block.

    `value` is broadcast to (*dimensions before, picked elements in row-major order, *dimensions
    after).
    """
    operator = "assignment"
    stop = first + mask.dim()
    over = tuple(input.shape[first:stop]), input.cuts[first:stop]
    check_mask(mask, over[0], input)
    grid = common_grid(operator, (input, mask, value))
    behind = input.dim() - stop
    while value.dim() > first + 1 + behind and value.shape[0] == 1:
        value = value.squeeze(0)
    of_each = value.dim() > behind and value.shape[-1 - behind] != 1
    if value.dtype != input.dtype and value.numel() != 1:
        raise RuntimeError(
            f"{operator}: {value.dtype} values for a tensor of {input.dtype}; convert them"
        )
    here = local_operand(mask, *over, grid, operator)
    selection = None
    number = 1
    if of_each:
        selection = Selection(DistTensor(here, *over, grid), operator)
        number = selection.total
    shape = (*input.shape[:first], number, *input.shape[stop:])
    cuts = (*input.cuts[:first], (), *input.cuts[stop:])
    sizes = zip(value.shape[::-1], shape[::-1], strict=False)
    if value.dim() > len(shape) or any(n not in (1, m) for n, m in sizes):
        raise RuntimeError(
            f"{operator}: values {tuple(value.shape)} cannot be broadcast to the {shape} that are "
            "picked"
        )
    own = local_operand(value, shape, cuts, grid, operator)
    if selection is not None:
        own = own.index_select(own.dim() - 1 - behind, selection.places)
    input.shard[(*(slice(None),) * first, here)] = own
    finish_write(input)


def check_mask(mask: Tensor, shape: Shape, input: Tensor) -> None:
    """Raise IndexError if a mask of dimensions of `input`, of `shape`, has another shape."""
    if tuple(mask.shape) != shape:
        raise IndexError(
            f"the mask of shape {tuple(mask.shape)} does not match the dimensions {shape} of the "
            f"tensor of shape {tuple(input.shape)}"
        )


@implements(torch.masked_select, torch.Tensor.masked_select)
def masked_select(input: Tensor, mask: Tensor) -> DistTensor:
    if mask.dtype != torch.bool:
        raise RuntimeError(f"masked_select: a mask of {mask.dtype}; expected torch.bool")
    shape = broadcast_shape("masked_select", (input, mask))
    return picked_by_mask(input.expand(shape), mask.expand(shape), "masked_select")


def positions(input: DistTensor, operator: str) -> DistTensor:
    """Return the global positions of nonzero elements, (elements, dimensions). Collective.

    `operator` is the called function, for records.
    """
    runs = factors_of(input)
    x = input if input.unmerged is None else cast(DistTensor, input.unmerged)
    chosen = x.shard != 0
    selection = Selection(DistTensor(chosen, x.shape, x.cuts, x.grid), operator)
    start = torch.tensor(x.box.start, dtype=torch.int64, device=x.device)
    digits = iter((chosen.nonzero() + start).unbind(1))
    columns: list[Tensor] = []
    for run in runs:
        place: Any = 0
        for n in run:
            place = place * n + next(digits)
        columns.append(place)
    rows = selection.bring(torch.stack(columns, 1)) if columns else chosen.nonzero()
    return as_distributed(rows, x.grid)


def _positions(function: Callable[..., Any]) -> None:
    @implements(function)
    def rule(input: DistTensor, *, as_tuple: bool = False) -> Any:
        found = positions(input, "nonzero")
        if not as_tuple:
            return found
        if not input.dim():  # torch treats it as a vector
            return (as_distributed(found.shard.new_zeros(len(found)), input.grid),)
        return found.unbind(1)


for _home in (torch, torch.Tensor):
    for _name in ("argwhere", "nonzero"):
        _positions(getattr(_home, _name))
