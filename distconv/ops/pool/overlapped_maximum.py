"""Max pooling that computes while its halos travel, and copies no activation.

The local operator runs on the rank's own block, with nothing in place of what other ranks hold.
When their halos have arrived, the few outputs that they may change are computed again from strips
of halos and own inputs, by the same operator, so that ties and nan are decided as ever. Backward,
the gradients of the strips come first, and what of them belongs to other ranks travels while the
full local pass runs, without the outputs of the strips. Nothing but places of maxima is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distconv.comm.shard_function import ShardFunction
from distconv.comm.transfer import Transfer, accumulate
from distconv.geometry.halo.maxima import BoundaryStrip, MaximaBoundary, maxima_boundary
from distconv.geometry.index_maps import Window
from distconv.ops.pool.local_pooling import unread_input, with_some_channel
from distconv.ops.pool.positions import fill_border, lowest_value, renumber_positions
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import record_gather
from distconv.torch_private import max_pool_with_places


def overlapped_maxima(
    x: DistTensor,
    windows: Sequence[Window],
    shape: tuple[int, ...],
    ceil_mode: bool,
    operator: str,
    *,
    places: bool,
) -> Any:
    """Return maxima of global `shape`, and if asked for, their numbers in the global plane.

    `needs_halo` allows it of pooling with `ceil_mode`; all ranks call it.
    """
    grid = x.grid
    edge = maxima_boundary(grid.topology, grid.rank, tuple(x.shape), shape, x.cuts, tuple(windows))
    record_gather(x, edge.plan, x.cuts, operator)
    pool = _LocalMaxPool(tuple(windows), ceil_mode)
    plane = tuple(x.shape[2:]) if places else None
    results = _Maxima.apply(x.shard, pool, edge, plane, Transfer(edge.plan, grid))
    return tuple(DistTensor(y, shape, x.cuts, grid) for y in results if y is not None)


@dataclass(frozen=True)
class _LocalMaxPool:
    """torch's max pooling of any piece; in one dimension by way of two."""

    windows: tuple[Window, ...]
    ceil_mode: bool

    def forward(self, x: Tensor, padding: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return maxima and their places in `x`."""
        flat = len(padding) == 1
        inputs = with_some_channel(x).unsqueeze(2) if flat else with_some_channel(x)
        function = max_pool_with_places[max(len(padding), 2)]
        results = function(inputs, *self._arguments(padding))
        if flat:
            # In place, as no autograd function may return a view that others change in place.
            results = tuple(y.squeeze_(2) for y in results)
        if not x.shape[1]:
            results = tuple(y.new_empty(*x.shape[:2], *y.shape[2:]) for y in results)
        values, index = results
        return values, index

    def backward(
        self, dy: Tensor, index: Tensor, shape: tuple[int, ...], padding: tuple[int, ...]
    ) -> Tensor:
        """Return the gradient of inputs of `shape`."""
        flat = len(padding) == 1
        pieces = [with_some_channel(t) for t in (dy, index)]
        if flat:
            pieces = [t.unsqueeze(2) for t in pieces]
        dy, index = pieces
        plane = (1, *shape[2:]) if flat else shape[2:]
        lead = shape[:2] if shape[1] else (0, 1)
        inputs = unread_input((*lead, *plane), dy)
        aten = torch.ops.aten
        volume = aten.max_pool3d_with_indices_backward
        function: Any = volume if len(padding) == 3 else aten.max_pool2d_with_indices_backward
        dx: Tensor = function(dy, inputs, *self._arguments(padding), index)
        return dx.reshape(shape)

    def _arguments(self, padding: tuple[int, ...]) -> tuple[Any, ...]:
        rows = [
            (w.kernel, w.stride, p, w.dilation) for w, p in zip(self.windows, padding, strict=True)
        ]
        if len(rows) == 1:
            rows.insert(0, (1, 1, 0, 1))
        return (*zip(*rows, strict=True), self.ceil_mode)


class _Maxima(ShardFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        pool: _LocalMaxPool,
        edge: MaximaBoundary,
        plane: tuple[int, ...] | None,
        transfer: Transfer,
    ) -> tuple[Tensor, Tensor | None]:
        arriving = transfer.start_forward(x)
        y, index = pool.forward(x, edge.padding)
        places = None
        if plane is not None:
            places = renumber_positions(index, x.shape[2:], edge.starts, pool.windows, plane)
        halos = arriving.finish()
        of_strips = []
        for strip in edge.strips:
            inputs = _strip_inputs(strip, x, halos, pool.windows)
            values, found = pool.forward(inputs, strip.padding)
            y[strip.outputs] = values
            searched = strip.shape[2:], strip.starts, pool.windows
            if places is not None and plane is not None:
                places[strip.outputs] = renumber_positions(found, *searched, plane)
            if min(strip.starts) < 0:
                found = renumber_positions(found, *searched, strip.shape[2:], strip.starts)
            of_strips.append(found)
        ctx.save_for_backward(index, *of_strips)
        ctx.context = pool, edge, tuple(x.shape), transfer
        if places is not None:
            ctx.mark_non_differentiable(places)
        return y, places

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        index, *of_strips = ctx.saved_tensors
        pool, edge, shape, transfer = ctx.context
        plan, dy = edge.plan, grads[0]
        from_strips = [
            pool.backward(dy[strip.outputs], found, strip.shape, strip.padding)
            for strip, found in zip(edge.strips, of_strips, strict=True)
        ]
        differentiable = torch.is_grad_enabled()
        if not differentiable:
            # What belongs to others travels while the rest is computed.
            leaving = [dy.new_zeros(route.shape) for route in plan.receives]
            for strip, dstrip in zip(edge.strips, from_strips, strict=True):
                for part in strip.halo:
                    part.of(leaving)[part.box] += dstrip[part.place]
            arriving = transfer.start_backward(leaving, dy)
        if edge.strips:
            dy = dy.clone()
            for strip in edge.strips:
                dy[strip.outputs] = 0
        dx = pool.backward(dy, index, shape, edge.padding)
        if differentiable:
            buffer = dx.new_zeros(plan.buffer_shape)
            for source, target in plan.own:
                buffer[target] = dx[source]
            for strip, dstrip in zip(edge.strips, from_strips, strict=True):
                buffer[strip.place].add_(dstrip)
            return accumulate(buffer, plan, transfer.grid), None, None, None, None
        for strip, dstrip in zip(edge.strips, from_strips, strict=True):
            for source, place in strip.own:
                dx[source].add_(dstrip[place])
        arriving.finish_adding_to(dx)
        return dx, None, None, None, None


def _strip_inputs(
    strip: BoundaryStrip, x: Tensor, halos: Sequence[Tensor], windows: Sequence[Window]
) -> Tensor:
    """Return the inputs of a strip, and `lowest_value` where they are padding."""
    inputs = x.new_full(strip.shape, lowest_value(x))
    for source, place in strip.own:
        inputs[place] = x[source]
    for part in strip.halo:
        inputs[part.place] = part.of(halos)[part.box]
    return fill_border(inputs, windows, strip.starts)
