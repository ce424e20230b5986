"""Redistribution to other cuts, and gathering of the inputs that an operator needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distconv.comm import transfer
from distconv.comm.ledger import Movement, current_trace, record
from distconv.geometry.index_maps import IndexMap, Same
from distconv.geometry.layout import Cuts, Layout, default_cuts, effective_cuts
from distconv.geometry.plan import Plan, make_plan
from distconv.geometry.topology import Topology
from distconv.grid.interface import Grid
from distconv.tensor.aliasing import make_view, prepare_write, update_views
from distconv.tensor.base import Distributed, DistTensorBase, is_view_of
from distconv.tensor.dispatch import outermost_call
from distconv.torch_private import is_marked_parameter


def gather_inputs(
    x: DistTensorBase, needs: Sequence[IndexMap], cuts: Cuts, operator: str, fill: float = 0.0
) -> Tensor:
    """Return the buffer with all inputs that this rank needs for its block of an output.

    `needs` has an index map for each dimension; the output is cut by `cuts`. If these are not the
    cuts of `x`, the ledger records a redistribution for `operator`. `fill` is the value outside the
    tensor, as in padding. All ranks call it.
    """
    grid = x.grid
    plan = plan_to_gather(grid.topology, grid.rank, tuple(x.shape), x.cuts, needs, cuts)
    return gather_by(plan, x, cuts, operator, fill)


def plan_to_gather(
    topology: Topology,
    rank: int,
    shape: tuple[int, ...],
    source: Cuts,
    needs: Sequence[IndexMap],
    target: Cuts,
) -> Plan | None:
    """Return this rank's plan of `gather_inputs`, for a tensor of `shape` cut by `source`.

    The output is cut by `target`; `needs` has an index map for each dimension. None if every rank's
    own block holds all inputs that it needs.
    """
    if target == source and all(isinstance(need, Same) for need in needs):
        return None
    return make_plan(topology, rank, shape, source, target, tuple(needs))


def gather_by(
    plan: Plan | None,
    x: DistTensorBase,
    cuts: Cuts,
    operator: str,
    fill: float = 0.0,
    owns_gradient: bool = False,
) -> Tensor:
    """Return the buffer of `gather_inputs`, given its plan; if `plan` is None, the block of `x`.

    The other arguments are those of `gather_inputs` and of `comm.transfer.gather`. All ranks call
    it.
    """
    if plan is None:
        return x.shard
    record_gather(x, plan, cuts, operator)
    return transfer.gather(x.shard, plan, x.grid, fill, owns_gradient)


def reduce_scatter(
    partial: Tensor, shape: tuple[int, ...], source: Cuts, target: Cuts, grid: Grid, operator: str
) -> Tensor:
    """Sum partial results over ranks, and return this rank's block of the sum, cut by `target`.

    `partial` is this rank's summand, a block of a tensor of `shape` cut by `source`. The sum is
    over the ranks along the axes that only `target` cuts; without such axes `partial` is returned.
    The ledger records the move under `operator`. All ranks call it.
    """
    if source == target:
        return partial
    plan = make_plan(grid.topology, grid.rank, shape, target, source, (Same(),) * len(shape))
    layouts = Layout.of(source), Layout.of(target)
    record(Movement(operator, *layouts, plan, partial.element_size(), adjoint=True))
    return transfer.accumulate(partial, plan, grid)


def record_gather(x: DistTensorBase, plan: Plan, cuts: Cuts, operator: str) -> None:
    """Record in the ledger that `operator`, with an output cut by `cuts`, gathered its inputs."""
    if cuts != x.cuts or current_trace() is not None:
        itemsize = x.shard.element_size()
        target = Layout.of(cuts, weight=is_marked_parameter(x))
        record(Movement(operator, x.grid_layout, target, plan, itemsize))


def redistribute(x: Distributed, cuts: Cuts, operator: str) -> Distributed:
    """Return `x` cut by `cuts`; the ledger records it under `operator`. All ranks call it."""
    if cuts == x.cuts:
        return x
    shard = gather_inputs(x, (Same(),) * x.dim(), cuts, operator)
    return type(x)(shard, x.shape, cuts, x.grid)


def redistribute_once(x: Distributed, cuts: Cuts, operator: str) -> Distributed:
    """Return `x` cut by `cuts`, moved only once within the outermost call of a parallelized module.

    The result is a view of `x`: a write to it changes `x`. The ledger records the move under
    `operator`. All ranks call it.
    """
    if cuts == x.cuts:
        return x
    call, state = outermost_call(), None
    # Inference tensors count no versions; a copy made without gradients is of use without them
    # only.
    if call is not None and not x.shard.is_inference():
        state = call, torch.is_grad_enabled(), x.shard.requires_grad, x.shard._version
        made = x._redistributed.get(cuts)
        if made is not None and made[0] == state:
            return _recut(x, made[1], cuts, operator)
    shard = redistribute(x, cuts, operator).shard
    if call is not None and state is not None:
        call.note(x)
        # Not the view, which keeps `x` alive.
        x._redistributed[cuts] = state, shard
    return _recut(x, shard, cuts, operator)


def _recut(x: Distributed, shard: Tensor, cuts: Cuts, operator: str) -> Distributed:
    """Return a view of `x` that is cut by `cuts`, and has the block `shard`, brought already.

    Writes to the view redistribute it back; the ledger then names `operator`.
    """

    def write(base: DistTensorBase, view: DistTensorBase) -> None:
        overwrite(base, view, operator)

    return make_view(
        x, shard, x.shape, cuts, lambda base: redistribute(base, cuts, operator), write
    )


def overwrite(x: DistTensorBase, value: DistTensorBase, operator: str) -> None:
    """Overwrite `x`, and its base if `x` is a view, by `value`, for the function `operator`.

    `value` has the shape of `x`, and may have other cuts. All ranks call it.
    """
    own = redistribute(value, x.cuts, operator).shard
    prepare_write(x, operator)
    if not is_view_of(own, x.shard):
        x.shard.copy_(own)
    update_views(x)


def check_grid(grid: Any) -> None:
    """Raise `TypeError` for an object that is no grid."""
    if not isinstance(grid, Grid):
        raise TypeError(f"grid={grid!r} is not a ProcessGrid; create one by ProcessGrid(height=-1)")


def cuts_of_layout(layout: Layout | None, grid: Grid, ndim: int) -> Cuts:
    """Return the cuts of a tensor of `ndim` dimensions in `layout`; None is the default layout.

    Raises `TypeError` if `layout` is no `Layout`, or `grid` no `ProcessGrid`.
    """
    check_grid(grid)
    if layout is None:
        return default_cuts(ndim, grid.topology)
    if not isinstance(layout, Layout):
        raise TypeError(
            f"layout={layout!r} is not a Layout; write Layout(height='height'), for example, or "
            "x.grid_layout for the layout of the tensor x"
        )
    return effective_cuts(layout.cuts(ndim), grid.topology)
