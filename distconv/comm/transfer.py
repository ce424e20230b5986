"""Movements of data between ranks, each with its adjoint, as autograd functions.

The adjoints follow one rule: the gradient of a replicated value is the sum over its replicas. So a
gather is undone by accumulation, a sum over ranks by the same sum, and a value that leaves the
distributed world is shared out equally over its replicas.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from distconv.comm.packing import (
    add_received,
    empty_in_format,
    pack_messages,
    receive_buffer,
    receive_buffers,
    route_boxes,
)
from distconv.geometry.plan import Plan
from distconv.grid.process_grid import ProcessGrid


def gather(local: Tensor, plan: Plan, grid: ProcessGrid, fill: float = 0.0) -> Tensor:
    """The buffer of `plan`, with `fill` where it reaches outside the tensor.

    All ranks of the grid call it, with their own block and their own plan of one movement. Where
    every rank's buffer is its own block, that block itself is returned. Otherwise all ranks record
    the movement: with other graphs, their backward passes would communicate in other orders.
    """
    tag = grid.transport.next_tag()
    if plan.identity:
        return local
    result: Tensor = _Gather.apply(local, plan, grid, tag, fill)
    return result


def accumulate(buffer: Tensor, plan: Plan, grid: ProcessGrid) -> Tensor:
    """The adjoint of `gather`: what was gathered goes back to its owner and is added up."""
    tag = grid.transport.next_tag()
    if plan.identity:
        return buffer
    result: Tensor = _Accumulate.apply(buffer, plan, grid, tag)
    return result


class _Gather(Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, plan: Plan, grid: ProcessGrid, tag: int, fill: float
    ) -> Tensor:
        ctx.movement = plan, grid, tag
        leaving = pack_messages(local, plan.sends, grid)
        if plan.buffer_is_block:
            grid.transport.exchange((), leaving, tag).wait()
            return local.clone()
        buffer = empty_in_format(plan.buffer_shape, local)
        if not plan.covered:
            buffer.fill_(fill)
        incoming = [(r.peer, receive_buffer(buffer, r, grid)) for r in plan.receives]
        messages = grid.transport.exchange(incoming, leaving, tag)
        for source, target in plan.own:
            buffer[target] = local[source]
        messages.wait()
        for route, (_, message) in zip(plan.receives, incoming, strict=True):
            for place, part in route_boxes(buffer, route, message):
                if part.data_ptr() != place.data_ptr():
                    place.copy_(part)
        return buffer

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan, grid, tag = ctx.movement
        return _Accumulate.apply(grads[0], plan, grid, tag), None, None, None, None


class _Accumulate(Function):
    @staticmethod
    def forward(ctx: Any, buffer: Tensor, plan: Plan, grid: ProcessGrid, tag: int) -> Tensor:
        ctx.movement = plan, grid, tag
        block = empty_in_format(plan.block_shape, buffer)
        incoming = receive_buffers(plan.sends, buffer, grid)
        leaving = pack_messages(buffer, plan.receives, grid)
        messages = grid.transport.exchange(incoming, leaving, tag)
        whole = tuple(slice(0, n) for n in plan.block_shape)
        rest = plan.own
        if rest and rest[0][0] == whole:
            block.copy_(buffer[rest[0][1]])
            rest = rest[1:]
        else:
            block.zero_()
        for source, target in rest:
            block[source] += buffer[target]
        messages.wait()
        add_received(block, plan.sends, incoming)
        return block

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan, grid, tag = ctx.movement
        return _Gather.apply(grads[0], plan, grid, tag, 0.0), None, None, None
