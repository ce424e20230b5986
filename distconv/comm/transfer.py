"""`Transfer`: a plan in motion, which moves data between ranks, and its adjoint.

The gradient of a replicated value is the sum over its replicas, so the adjoint of a copy to several
ranks is the sum over these ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distconv.comm.packing import (
    CHANNELS_LAST,
    empty_in_format,
    has_channels_last,
    pack_messages,
    receive_buffers,
    route_boxes,
)
from distconv.comm.shard_function import ShardFunction
from distconv.geometry.plan import Plan, Route
from distconv.grid.interface import Grid
from distconv.transport.interface import Message, Request


class InFlight:
    """The messages of a started `Transfer`, and the memory into which they arrive.

    If it is dropped without `finish`, as after an exception, the transport keeps the memory until
    the messages have arrived.
    """

    __slots__ = ("_incoming", "_request", "_routes")

    def __init__(self, routes: Sequence[Route], incoming: Sequence[Message], request: Request):
        self._routes, self._incoming, self._request = routes, incoming, request

    def finish(self) -> list[Tensor]:
        """Wait for the messages, and return them in the order of the plan's routes."""
        self._request.wait()
        return [message for _, message in self._incoming]

    def finish_into(self, buffer: Tensor) -> None:
        """Wait for the messages, and copy them to their boxes of `buffer`."""
        for route, message in zip(self._routes, self.finish(), strict=True):
            for place, part in route_boxes(buffer, route, message):
                if part.data_ptr() != place.data_ptr():
                    place.copy_(part)

    def finish_adding_to(self, block: Tensor) -> None:
        """Wait for the messages, and add them to their boxes of `block`."""
        for route, message in zip(self._routes, self.finish(), strict=True):
            for place, part in route_boxes(block, route, message):
                place.add_(part)


class Transfer:
    """One plan on one grid, under one tag.

    `forward` fills a buffer from this rank's block and its halos on other ranks. `backward` is the
    adjoint: it sends each piece of a buffer to its owner, who sums the pieces. Each can also be
    started, and finished after other computation. All ranks of the grid make the same transfers and
    start them in the same order, each with its own plan.
    """

    __slots__ = ("_tag", "grid", "plan")

    def __init__(self, plan: Plan, grid: Grid):
        self.plan, self.grid = plan, grid
        self._tag = grid.transport.next_tag()

    def start_forward(self, block: Tensor, buffer: Tensor | None = None) -> InFlight:
        """Start to send the boxes of `block` that other ranks need, and to receive the halos.

        Halos arrive in `buffer` itself where they are contiguous there, else in memory of their
        own.
        """
        routes, grid = self.plan.receives, self.grid
        leaving = pack_messages(block, self.plan.sends, grid)
        incoming = receive_buffers(routes, block, grid, buffer)
        return InFlight(routes, incoming, grid.transport.exchange(incoming, leaving, self._tag))

    def forward(self, block: Tensor, fill: float = 0.0) -> Tensor:
        """Return the plan's buffer for this rank's `block`, with `fill` outside the tensor."""
        plan = self.plan
        if plan.buffer_is_block:
            self.start_forward(block).finish()
            return block.clone()
        if plan.pieces is not None:
            return self._joined(block, fill, *plan.pieces)
        buffer = empty_in_format(plan.buffer_shape, block)
        if not plan.covered:
            buffer.fill_(fill)
        halos = self.start_forward(block, buffer)
        for source, target in plan.own:
            buffer[target] = block[source]
        halos.finish_into(buffer)
        return buffer

    def _joined(
        self, block: Tensor, fill: float, along: int, pieces: Sequence[int | tuple[int, ...]]
    ) -> Tensor:
        """Return the plan's buffer for `block`: `pieces`, concatenated along dimension `along`.

        `Plan.pieces` gives both; `fill` is the value of padding.
        """
        arrived = self.start_forward(block).finish()
        source = self.plan.own[0][0]
        own = block if source == self.plan.whole_block else block[source]
        parts = []
        for piece in pieces:
            part = own
            if piece != -1:
                part = arrived[piece] if isinstance(piece, int) else block.new_full(piece, fill)
                if has_channels_last(block):
                    part = part.contiguous(memory_format=CHANNELS_LAST[block.dim()])
            parts.append(part)
        return torch.cat(parts, along)

    def start_backward(self, gradients: Sequence[Tensor], like: Tensor) -> InFlight:
        """Start to send gradients of halos to their owners, and receive gradients of the own block.

        `gradients` has for each route of `plan.receives` the gradient of its halo, contiguous.
        Messages arrive in memory of the type and device of `like`.
        """
        plan, grid = self.plan, self.grid
        leaving = [(r.peer, d) for r, d in zip(plan.receives, gradients, strict=True)]
        incoming = receive_buffers(plan.sends, like, grid)
        return InFlight(plan.sends, incoming, grid.transport.exchange(incoming, leaving, self._tag))

    def backward(self, buffer: Tensor) -> Tensor:
        """Return this rank's block: the sum of its elements in all ranks' buffers."""
        plan = self.plan
        leaving = [message for _, message in pack_messages(buffer, plan.receives, self.grid)]
        gradients = self.start_backward(leaving, buffer)
        own = plan.own
        if own and own[0][0] == plan.whole_block:
            block = buffer[own[0][1]].clone()
            own = own[1:]
        else:
            block = empty_in_format(plan.block_shape, buffer).zero_()
        for source, target in own:
            block[source].add_(buffer[target])
        gradients.finish_adding_to(block)
        return block


def gather(local: Tensor, plan: Plan, grid: Grid, fill: float = 0.0) -> Tensor:
    """Return the plan's buffer for this rank's block `local`, with `fill` outside the tensor.

    Differentiable. All ranks of the grid call it, each with its own plan. If every rank's buffer is
    its own block, that block is returned. Otherwise all ranks record the movement, so that their
    backward passes communicate in one order.
    """
    transfer = Transfer(plan, grid)
    if plan.identity:
        return local
    result: Tensor = _Move.apply(local, transfer, False, fill)
    return result


def accumulate(buffer: Tensor, plan: Plan, grid: Grid) -> Tensor:
    """Return this rank's block: the sum of its elements in all ranks' buffers.

    Differentiable, the adjoint of `gather`. All ranks of the grid call it, each with its own plan.
    """
    transfer = Transfer(plan, grid)
    if plan.identity:
        return buffer
    result: Tensor = _Move.apply(buffer, transfer, True, 0.0)
    return result


class _Move(ShardFunction):
    """A transfer, or its adjoint, as a function of autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: Transfer, adjoint: bool, fill: float) -> Tensor:
        ctx.movement = transfer, adjoint
        return transfer.backward(x) if adjoint else transfer.forward(x, fill)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        transfer, adjoint = ctx.movement
        if torch.is_grad_enabled():
            moved = _Move.apply(grads[0], transfer, not adjoint, 0.0)
        else:
            moved = transfer.forward(grads[0]) if adjoint else transfer.backward(grads[0])
        return moved, None, None, None
