"""Redistribution of DistTensors, and gathering of the inputs that an operator needs.

`cuts` are, for each dimension of a tensor, the grid axes that partition the dimension.
"""

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
    """Return the buffer with all elements of `x` that this rank needs for its block of an output.

    `needs` has an index map for each dimension, and `cuts` partitions the output. If `x` is
    partitioned differently, the ledger records a redistribution for `operator`. `fill` is the value
    of padding, outside the global tensor. Collective.
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
    """Return this rank's plan of `gather_inputs`, for an input of global `shape`.

    `source` partitions the input, and `target` the output; `needs` has an index map for each
    dimension. Return None if every rank's own block holds all inputs that the rank needs.
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
    """Return the buffer of `gather_inputs` by a given `plan`; if `plan` is None, the block of `x`.

    The other arguments are those of `gather_inputs` and of `comm.transfer.gather`. Collective.
    """
    if plan is None:
        return x.shard
    record_gather(x, plan, cuts, operator)
    return transfer.gather(x.shard, plan, x.grid, fill, owns_gradient)


def reduce_scatter(
    partial: Tensor, shape: tuple[int, ...], source: Cuts, target: Cuts, grid: Grid, operator: str
) -> Tensor:
    """Sum partial results over ranks, and return this rank's block of the sum.

    `partial` is this rank's summand, a block of a tensor of global `shape` partitioned by `source`.
    The sum is partitioned by `target`, and is over the ranks along the grid axes in `target` that
    are not in `source`. The ledger records a redistribution for `operator`. Collective, unless
    `source` equals `target`: then `partial` is returned.
    """
    if source == target:
        return partial
    plan = make_plan(grid.topology, grid.rank, shape, target, source, (Same(),) * len(shape))
    layouts = Layout.of(source), Layout.of(target)
    record(Movement(operator, *layouts, plan, partial.element_size(), adjoint=True))
    return transfer.accumulate(partial, plan, grid)


def record_gather(x: DistTensorBase, plan: Plan, cuts: Cuts, operator: str) -> None:
    """Record in the ledger that `operator`, with an output of `cuts`, gathered `x` by `plan`."""
    if cuts != x.cuts or current_trace() is not None:
        itemsize = x.shard.element_size()
        target = Layout.of(cuts, weight=is_marked_parameter(x))
        record(Movement(operator, x.grid_layout, target, plan, itemsize))


def redistribute(x: Distributed, cuts: Cuts, operator: str) -> Distributed:
    """Return `x` partitioned by `cuts`, recorded in the ledger for `operator`. Collective."""
    if cuts == x.cuts:
        return x
    shard = gather_inputs(x, (Same(),) * x.dim(), cuts, operator)
    return type(x)(shard, x.shape, cuts, x.grid)


def redistribute_once(x: Distributed, cuts: Cuts, operator: str) -> Distributed:
    """Return `x` partitioned by `cuts`, cached for the outermost call of a parallelized module.

    A second redistribution of an unchanged `x` within the call needs no message. The result is a
    view of `x`: a write to the result changes `x`. The ledger records the redistribution for
    `operator`. Collective.
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
            return _view_in_layout(x, made[1], cuts, operator)
    shard = redistribute(x, cuts, operator).shard
    if call is not None and state is not None:
        call.note(x)
        # Not the view, which keeps `x` alive.
        x._redistributed[cuts] = state, shard
    return _view_in_layout(x, shard, cuts, operator)


def _view_in_layout(x: Distributed, shard: Tensor, cuts: Cuts, operator: str) -> Distributed:
    """Return a view of `x` that is partitioned by `cuts`, with the redistributed block `shard`.

    A write to the view redistributes the view back into `x`; the ledger records this for
    `operator`. No communication.
    """

    def write(base: DistTensorBase, view: DistTensorBase) -> None:
        overwrite(base, view, operator)

    return make_view(
        x, shard, x.shape, cuts, lambda base: redistribute(base, cuts, operator), write
    )


def overwrite(x: DistTensorBase, value: DistTensorBase, operator: str) -> None:
    """Overwrite `x`, and its base if `x` is a view, by `value`, for the function `operator`.

    `value` has the shape of `x`, and may be partitioned differently. Collective.
    """
    own = redistribute(value, x.cuts, operator).shard
    prepare_write(x, operator)
    if not is_view_of(own, x.shard):
        x.shard.copy_(own)
    update_views(x)


def check_grid(grid: Any) -> None:
    """Raise `TypeError` if `grid` is not a grid."""
    if not isinstance(grid, Grid):
        raise TypeError(f"grid={grid!r} is not a ProcessGrid; create one by ProcessGrid(height=-1)")


def cuts_of_layout(layout: Layout | None, grid: Grid, ndim: int) -> Cuts:
    """Return the grid axes that partition each dimension of a tensor of `ndim` dimensions.

    `layout` is the tensor's layout, or None for the default layout. Axes of one rank are left out.
    Raises `TypeError` if `layout` is not a `Layout`, or `grid` is not a grid.
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
