"""Convolution that computes while its halos travel, and copies nothing of the input's size.

The local convolution runs on the rank's own block as it is, with zeros in place of what other ranks
hold. When their halos have arrived, what these contribute is added, side by side (`boundary`).
Backward, the gradients of the halos come first and travel while the full local pass runs; the
weight gradient is the local one and that of the sides. Only the halos are saved beside the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from distconv.boundary import Boundary, Slab, boundary
from distconv.exchange import (
    Messages,
    accumulate,
    add_arrived,
    gather,
    landings_of,
    packed,
)
from distconv.grid import ProcessGrid
from distconv.layout import Cuts, rank_box
from distconv.ops.checked import autocast_type
from distconv.plan import Plan, make_plan
from distconv.tensor import DistTensor, note
from distconv.topology import Topology
from distconv.window import Same, Window


class _Geometry(NamedTuple):
    """A convolution on this rank's block: what it exchanges, and what it computes."""

    plan: Plan
    boundary: Boundary
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def arguments(self, padding: tuple[int, ...]) -> tuple[Any, ...]:
        """Those of torch.convolution after the bias; it is not a transposed one."""
        return _arguments(self.stride, padding, self.dilation, self.groups)

    def side(self, slab: Slab, halos: Sequence[Tensor], y: Tensor, weight: Tensor) -> _Side:
        """The convolution of one side's halos."""
        if slab.whole:
            inputs = slab.halo[0].of(halos)
        else:
            inputs = halos[0].new_zeros(slab.shape)
            for part in slab.halo:
                inputs[part.place] = part.of(halos)[part.box]
        outputs, taps = y[slab.outputs], weight[slab.taps]
        stride, padding, dilation = self.stride, slab.padding, self.dilation
        d = slab.dimension
        flat = len(self.stride) == 3 and inputs.shape[d] == outputs.shape[d] == taps.shape[d] == 1
        if flat:
            # One plane of a volume: two-dimensional convolution is several times as fast.
            inputs, outputs, taps = (t.squeeze(d) for t in (inputs, outputs, taps))
            stride, padding, dilation = (
                (*a[: d - 2], *a[d - 1 :]) for a in (stride, padding, dilation)
            )
        arguments = _arguments(stride, padding, dilation, self.groups)
        return _Side(inputs, outputs, taps, arguments, d if flat else None)


class _Side(NamedTuple):
    """Operands of the convolution of one side, without the dimension `squeezed`."""

    inputs: Tensor
    outputs: Tensor
    taps: Tensor
    arguments: tuple[Any, ...]
    squeezed: int | None

    def restored(self, x: Tensor) -> Tensor:
        """A result with all dimensions."""
        return x if self.squeezed is None else x.unsqueeze(self.squeezed)


def _arguments(
    stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...], groups: int
) -> tuple[Any, ...]:
    return stride, padding, dilation, False, (0,) * len(stride), groups


def overlapped_convolution(
    x: DistTensor,
    weight: Tensor,
    bias: Tensor | None,
    windows: Sequence[Window],
    shape: tuple[int, ...],
    groups: int,
    operator: str,
) -> DistTensor:
    """The convolution of `x`, which is whole along its channels; `boundary.reaches` allows it."""
    grid = x.grid
    geometry = _geometry(
        grid.topology, grid.rank, tuple(x.shape), x.cuts, shape, tuple(windows), groups
    )
    note(x, geometry.plan, x.cuts, operator)
    operands = _as_autocast(x.shard, weight, bias)
    shard = _Convolution.apply(*operands, geometry, grid, grid.transport.ticket())
    return DistTensor(shard, shape, x.cuts, grid)


@lru_cache(maxsize=4096)
def _geometry(
    topology: Topology,
    rank: int,
    shape: tuple[int, ...],
    cuts: Cuts,
    made: tuple[int, ...],
    windows: tuple[Window, ...],
    groups: int,
) -> _Geometry:
    cut = tuple(bool(axes) for axes in cuts[2:])
    needs = (w if c else Same() for w, c in zip(windows, cut, strict=True))
    plan = make_plan(topology, rank, shape, cuts, cuts, (Same(), Same(), *needs))
    own, out = (rank_box(s, cuts, topology, rank) for s in (shape, made))
    inputs, outputs = (tuple(zip(b.start[2:], b.stop[2:], strict=True)) for b in (own, out))
    edge = boundary(plan, windows, shape[2:], inputs, outputs, cut)
    strides, dilations = zip(*((w.stride, w.dilation) for w in windows), strict=True)
    return _Geometry(plan, edge, strides, dilations, groups)


def _as_autocast(*operands: Tensor | None) -> list[Tensor | None]:
    """The operands of a convolution in the type that autocast would give them."""
    kind = next(autocast_type(t) for t in operands if t is not None)
    if kind is None:
        return list(operands)
    return [
        t.to(kind) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in operands
    ]


class _Convolution(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: _Geometry,
        grid: ProcessGrid,
        tag: int,
    ) -> Tensor:
        plan, edge = geometry.plan, geometry.boundary
        landings = landings_of(plan.receives, x, grid)
        messages = Messages(landings, packed(x, plan.sends, grid), grid, tag)
        y = torch.convolution(x, weight, bias, *geometry.arguments(edge.padding))
        messages.finish()
        halos = [halo for _, halo in landings]
        for slab in edge.slabs:
            side = geometry.side(slab, halos, y, weight)
            side.outputs.add_(torch.convolution(side.inputs, side.taps, None, *side.arguments))
        ctx.save_for_backward(x, weight, *halos)
        ctx.context = geometry, grid, tag, None if bias is None else bias.shape
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *halos = ctx.saved_tensors
        geometry, grid, tag, bias_shape = ctx.context
        plan, edge = geometry.plan, geometry.boundary
        (dy,) = grads
        of_input, of_weight, of_bias = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            inputs = gather(x, plan, grid)
            arguments = geometry.arguments(edge.buffer_padding)
            mask = [of_input, of_weight, of_bias]
            dx, dw, db = _backward(dy, inputs, weight, bias_shape, *arguments, mask)
            if of_input:
                dx = accumulate(dx, plan, grid)
            return dx, dw, db, None, None, None

        # Gradients of halos first: they travel while the rest is computed.
        leaving = [torch.zeros_like(halo) for halo in halos] if of_input else []
        of_taps = []
        for slab in edge.slabs:
            side = geometry.side(slab, halos, dy, weight)
            mask = [of_input, of_weight, False]
            dhalo, dtaps, _ = _backward(
                side.outputs, side.inputs, side.taps, None, *side.arguments, mask
            )
            if of_weight:
                of_taps.append((slab.taps, side.restored(dtaps)))
            if of_input:
                dhalo = side.restored(dhalo)
                for part in slab.halo:
                    part.of(leaving)[part.box] += dhalo[part.place]
        if of_input:
            landings = landings_of(plan.sends, x, grid)
            routes = zip(plan.receives, leaving, strict=True)
            messages = Messages(landings, [(r.peer, d) for r, d in routes], grid, tag)
        arguments = geometry.arguments(edge.padding)
        mask = [of_input, of_weight, of_bias]
        dx, dw, db = _backward(dy, x, weight, bias_shape, *arguments, mask)
        if of_weight:
            for taps, dtaps in of_taps:
                dw[taps] += dtaps
        if of_input:
            messages.finish()
            add_arrived(dx, plan.sends, landings)
        return dx, dw, db, None, None, None


_backward: Any = torch.ops.aten.convolution_backward
