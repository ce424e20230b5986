"""`Transfer`: the communication of a plan, which sends blocks between ranks, and its adjoint.

The gradient of a replicated value is the sum over its replicas, so the adjoint of a copy to several
ranks is the sum over these ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distconv.comm.packing import (
    ReceiveBuffers,
    empty_in_format,
    filled,
    has_channels_last,
    is_without_gaps,
    pack_messages,
    places_apart,
    places_in,
    resolved_contiguous,
)
from distconv.geometry.plan import Plan
from distconv.grid.interface import Grid
from distconv.torch_private import ShardFunction
from distconv.transport.interface import Message


class InFlight:
    """The messages of a started `Transfer`, and the memory into which they are received.

    If the object is deleted without a `wait`, as after an exception, the transport keeps the memory
    until the messages have arrived.
    """

    __slots__ = ("_buffers", "_request", "_transfer")

    def __init__(self, transfer: Transfer, buffers: ReceiveBuffers, leaving: Sequence[Message]):
        exchange = transfer.grid.transport.exchange
        self._transfer, self._buffers = transfer, buffers
        self._request = exchange(buffers.messages, leaving, transfer.tag)

    def wait(self) -> list[Tensor]:
        """Wait for the messages, and return each message in the shape of its route, in order."""
        self._request.wait()
        plan = self._transfer.plan
        halos, last = [], plan.channels_last
        for route, (_, message) in zip(plan.packed.receives, self._buffers.messages, strict=True):
            halo = message.view(route.shape)
            halos.append(halo.movedim(-1, 1) if last else halo)
        return halos

    def wait_into(self, buffer: Tensor) -> None:
        """Wait for the messages, and copy each message to its boxes of `buffer`."""
        self._request.wait()
        transfer = self._transfer
        self._buffers.copy_to(buffer.movedim(1, -1) if transfer.plan.channels_last else buffer)

    def wait_and_add_to(self, block: Tensor) -> None:
        """Wait for the messages, and add each message to its boxes of `block`."""
        self._request.wait()
        plan, grid = self._transfer.plan.packed, self._transfer.grid
        if plan.sends:
            block = self._transfer.packed(block)
            self._buffers.add_to(block, places_in(block, plan, grid, of_block=True, sums=True))


class Transfer:
    """The communication of one plan on one grid, whose messages have one tag.

    `forward` fills a buffer with this rank's block and its halos from other ranks. `backward` is
    the adjoint: it sends each box of a buffer to the rank that owns the box, which sums what it
    receives. Each pass can also be started, and waited for after other computation. All ranks of
    the grid create the same transfers and start them in the same order, each with its own plan.
    """

    __slots__ = ("grid", "plan", "tag")

    def __init__(self, plan: Plan, grid: Grid):
        self.plan, self.grid = plan, grid
        self.tag = grid.transport.next_tag()

    def packed(self, tensor: Tensor) -> Tensor:
        """Return a view of a block or buffer with its dimensions in the order of a message's."""
        return tensor.movedim(1, -1) if self.plan.channels_last else tensor

    def start_forward(self, block: Tensor, buffer: Tensor | None = None) -> InFlight:
        """Start to send the boxes of `block` that other ranks need, and to receive the halos.

        Halos that are contiguous in `buffer` are received in place, all others in separate
        memory. Collective.
        """
        plan, grid = self.plan.packed, self.grid
        if self.plan.channels_last:
            block = block.movedim(1, -1)
            buffer = None if buffer is None else buffer.movedim(1, -1)
        leaving = pack_messages(block, plan, grid)
        if buffer is None:
            places = places_apart(plan, grid, of_block=False, sums=False)
        else:
            places = places_in(buffer, plan, grid, of_block=False)
        return InFlight(self, ReceiveBuffers(places, block, grid, buffer), leaving)

    def forward(self, block: Tensor, fill: float = 0.0) -> Tensor:
        """Return the plan's buffer for this rank's `block`; `fill` is the padding. Collective."""
        plan = self.plan
        if plan.buffer_is_block:
            self.start_forward(block).wait()
            return block.clone()
        last = has_channels_last(block)
        # Pieces with channels last would have to be copied before they are concatenated.
        if plan.pieces is not None and not last:
            return self._joined(block, fill, *plan.pieces)
        buffer = empty_in_format(plan.buffer_shape, block, last)
        if not plan.covered:
            buffer.fill_(fill)
        halos = self.start_forward(block, buffer)
        for source, target in plan.own:
            buffer[target] = block[source]
        halos.wait_into(buffer)
        return buffer

    def _joined(
        self, block: Tensor, fill: float, along: int, pieces: Sequence[int | tuple[int, ...]]
    ) -> Tensor:
        """Return the plan's buffer for `block`, concatenated from `pieces` along dimension `along`.

        `Plan.pieces` returns `along` and `pieces`; `fill` is the value of padding. Collective.
        """
        arrived = self.start_forward(block).wait()
        source = self.plan.own[0][0]
        own = block if source == self.plan.whole_block else block[source]
        parts = [
            (own if piece == -1 else arrived[piece])
            if isinstance(piece, int)
            else filled(block.device, piece, fill, block.dtype)
            for piece in pieces
        ]
        return torch.cat(parts, along)

    def start_backward(self, gradients: Sequence[Tensor], like: Tensor) -> InFlight:
        """Start to send gradients of halos to the owners, and to receive those of the own block.

        `gradients` has the gradient of the halo of each route of `plan.receives`. Messages are
        received in memory of the element type and device of `like`. Collective.
        """
        pairs = zip(self.plan.receives, gradients, strict=True)
        leaving = [(r.peer, resolved_contiguous(self.packed(d))) for r, d in pairs]
        return self._start_backward(leaving, like)

    def _start_backward(self, leaving: Sequence[Message], like: Tensor) -> InFlight:
        plan, grid = self.plan.packed, self.grid
        places = places_apart(plan, grid, of_block=True, sums=True)
        return InFlight(self, ReceiveBuffers(places, like, grid), leaving)

    def backward(self, buffer: Tensor, in_place: bool = False) -> Tensor:
        """Return this rank's block of the sum of all ranks' buffers. Collective.

        With `in_place`, `buffer` may be overwritten, and the block may be a view of `buffer` that
        is contiguous in one of torch's memory formats.
        """
        plan = self.plan
        leaving = pack_messages(self.packed(buffer), plan.packed, self.grid, of_block=False)
        gradients = self._start_backward(leaving, buffer)
        own = plan.own
        if own and own[0][0] == plan.whole_block:
            block = buffer[own[0][1]]
            if not (in_place and is_without_gaps(block)):
                block = block.clone()
        else:
            block = empty_in_format(plan.block_shape, buffer)
            block[plan.beside_own].zero_()
            if own:
                source, target = own[0]
                block[source] = buffer[target]
        for source, target in own[1:]:
            block[source].add_(buffer[target])
        gradients.wait_and_add_to(block)
        return block


def gather(
    local: Tensor, plan: Plan, grid: Grid, fill: float = 0.0, owns_gradient: bool = False
) -> Tensor:
    """Return the plan's buffer for this rank's block `local`; padding has the value `fill`.

    Differentiable. Collective; each rank passes its own plan. If every rank's buffer is its own
    block, `local` is returned. Otherwise all ranks record the exchange in autograd, so that their
    backward passes communicate in one order. `owns_gradient` states that nothing else reads the
    gradient of the buffer, which is then overwritten instead of copied.

    Examples
    --------
    >>> from distconv import exchange
    >>> from distconv.geometry.index_maps import Window
    >>> from distconv.geometry.plan import make_plan
    >>> grid = dc.ProcessGrid(height=2)
    >>> rows, needs = (("height",),), (Window(kernel=3, padding=(1, 1)),)
    >>> plan = make_plan(grid.topology, grid.rank, (4,), rows, rows, needs)
    >>> own = torch.arange(2.0) + 2 * grid.rank + 1  # 1, 2 and 3, 4
    >>> grid.all_gather_object(exchange.gather(own, plan, grid).tolist())
    [[0.0, 1.0, 2.0, 3.0], [2.0, 3.0, 4.0, 0.0]]
    """
    transfer = Transfer(plan, grid)
    if plan.identity:
        return local
    result: Tensor = _Move.apply(local, transfer, False, fill, owns_gradient)
    return result


def accumulate(buffer: Tensor, plan: Plan, grid: Grid) -> Tensor:
    """Return this rank's block of the sum of all ranks' buffers: the adjoint of `gather`.

    Differentiable. Collective; each rank passes its own plan.

    Examples
    --------
    >>> from distconv import exchange
    >>> from distconv.geometry.index_maps import Window
    >>> from distconv.geometry.plan import make_plan
    >>> grid = dc.ProcessGrid(height=2)
    >>> rows, needs = (("height",),), (Window(kernel=3, padding=(1, 1)),)
    >>> plan = make_plan(grid.topology, grid.rank, (4,), rows, rows, needs)
    >>> summed = exchange.accumulate(torch.ones(4), plan, grid)  # 2 rows with halos
    >>> grid.all_gather_object(summed.tolist())
    [[1.0, 2.0], [2.0, 1.0]]
    """
    transfer = Transfer(plan, grid)
    if plan.identity:
        return buffer
    result: Tensor = _Move.apply(buffer, transfer, True, 0.0, False)
    return result


def reorder(local: Tensor, plan: Plan, inverse: Plan, grid: Grid) -> Tensor:
    """Return `gather(local, plan, grid)` for a plan that sends each element to exactly one rank.

    Differentiable. The backward pass gathers by the plan `inverse`, without sums. Collective.
    """
    there, back = Transfer(plan, grid), Transfer(inverse, grid)
    if plan.identity:
        return local
    result: Tensor = _Reorder.apply(local, there, back)
    return result


class _Reorder(ShardFunction):
    """The autograd function of a transfer whose adjoint is the forward pass of another transfer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Transfer, back: Transfer) -> Tensor:
        ctx.movement = back, there
        return there.forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Reorder.apply(grads[0], *ctx.movement), None, None


class _Move(ShardFunction):
    """The autograd function of a transfer, or of its adjoint."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, transfer: Transfer, adjoint: bool, fill: float, owns_gradient: bool
    ) -> Tensor:
        ctx.movement = transfer, adjoint, owns_gradient
        return transfer.backward(x) if adjoint else transfer.forward(x, fill)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        transfer, adjoint, owns_gradient = ctx.movement
        if torch.is_grad_enabled():
            moved = _Move.apply(grads[0], transfer, not adjoint, 0.0, False)
        elif adjoint:
            moved = transfer.forward(grads[0])
        else:
            moved = transfer.backward(grads[0], in_place=owns_gradient)
        return moved, *(None,) * 4
