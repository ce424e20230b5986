"""Movements of data between ranks, each with its adjoint, as autograd functions.

The adjoints follow one rule: the gradient of a replicated value is the sum over its replicas. So a
gather is undone by accumulation, a sum over ranks by the same sum, and a value that leaves the
distributed world is shared out equally over its replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from distconv.grid import ProcessGrid
from distconv.plan import Plan, Route
from distconv.topology import AXES
from distconv.transport import Message


def gather(local: Tensor, plan: Plan, grid: ProcessGrid, fill: float = 0.0) -> Tensor:
    """The buffer of `plan`, with `fill` where it reaches outside the tensor.

    All ranks of the grid call it, with their own block and their own plan of one movement. Where
    every rank's buffer is its own block, that block itself is returned. Otherwise all ranks record
    the movement: with other graphs, their backward passes would communicate in other orders.
    """
    tag = grid.transport.ticket()
    if plan.identity:
        return local
    result: Tensor = _Gather.apply(local, plan, grid, tag, fill)
    return result


def accumulate(buffer: Tensor, plan: Plan, grid: ProcessGrid) -> Tensor:
    """The adjoint of `gather`: what was gathered goes back to its owner and is added up."""
    tag = grid.transport.ticket()
    if plan.identity:
        return buffer
    result: Tensor = _Accumulate.apply(buffer, plan, grid, tag)
    return result


def sum_over(local: Tensor, grid: ProcessGrid, axes: Iterable[str]) -> Tensor:
    """The sum of `local` over the ranks along `axes`, on each of them; those ranks call it."""
    return _among(_SumOver, local, grid, axes)


def share(local: Tensor, grid: ProcessGrid, axes: Iterable[str]) -> Tensor:
    """A value replicated along `axes` as a plain tensor: its gradient is shared out equally."""
    shared = _among(_Share, local, grid, axes)
    if shared is local and local.grad_fn is not None:
        notes: Any = local.grad_fn.metadata
        notes[_OUT] = True
    return shared


def is_handed_out(node: Any) -> bool:
    """Whether `share` has handed out what this node of the graph has made."""
    return isinstance(node, _Share._backward_cls) or _OUT in node.metadata


def handed_out(x: Tensor) -> bool:
    """Whether the graph of a plain tensor holds a replicated value that was shared out."""
    seen: set[Any] = set()
    waiting: list[Any] = [x.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or _PLAIN in node.metadata:
            continue
        if isinstance(node, _Share._backward_cls):
            return True
        seen.add(node)
        waiting.extend(following for following, _ in node.next_functions)
    for node in seen:
        node.metadata[_PLAIN] = True
    return False


_OUT = "distconv_out"
"""Notes on a node that its block was handed out to the plain world as it is."""

_PLAIN = "distconv_plain"
"""Notes on a node of the graph that nothing before it was shared out."""


def brought_in(roots: Iterable[Tensor], x: Tensor) -> set[bool]:
    """For the paths from `roots` to a plain tensor, whether `replicate` lies on them.

    What it has made of the tensor has a gradient that is whole on every rank already.
    """
    edge = get_gradient_edge(x)
    found, seen = set(), set()
    waiting: list[tuple[Any, bool]] = [
        (root.grad_fn, False) for root in roots if root.grad_fn is not None
    ]
    while waiting:
        node, replicated = step = waiting.pop()
        if step in seen:
            continue
        seen.add(step)
        replicated |= isinstance(node, _Replicate._backward_cls)
        for following, output in node.next_functions:
            if following is edge.node and output == edge.output_nr:
                found.add(replicated)
            elif following is not None:
                waiting.append((following, replicated))
    return found


def replicate(local: Tensor, grid: ProcessGrid, axes: Iterable[str]) -> Tensor:
    """A plain tensor, equal along `axes`, as a replicated value: its gradients are added up.

    What requires a gradient gets a node in the graph also where there is nothing to add, by which
    `brought_in` knows it.
    """
    result: Tensor = _Replicate.apply(local, grid, tuple(axes))
    return result


def parts_of(local: Tensor, grid: ProcessGrid, axes: Iterable[str]) -> Tensor:
    """The `local` of all ranks along `axes`, stacked in rank order; those ranks call it."""
    axes = tuple(axes)
    if grid.topology.parts(axes) == 1:
        return local.unsqueeze(0)
    return _among(_Parts, local, grid, axes)


def _among(
    function: type[Function], local: Tensor, grid: ProcessGrid, axes: Iterable[str]
) -> Tensor:
    """`function` of `local` over the ranks along `axes`; `local` itself where that is one rank."""
    axes = tuple(axes)
    if grid.topology.parts(axes) == 1:
        return local
    result: Tensor = function.apply(local, grid, axes)
    return result


def reduced(local: Tensor, grid: ProcessGrid, axes: Iterable[str]) -> Tensor:
    """A new tensor with the sum of `local` over the ranks along `axes`, outside autograd."""
    total = dense(local.detach()).clone(memory_format=torch.contiguous_format)
    add_up(total, grid, axes)
    return total


def add_up(tensor: Tensor, grid: ProcessGrid, axes: Iterable[str]) -> None:
    """Add up a contiguous tensor in place over the ranks along `axes`, outside autograd."""
    grid.transport.all_reduce(tensor, grid.communicator(axes)).wait()


def stacked(local: Tensor, grid: ProcessGrid, axes: Iterable[str]) -> Tensor:
    """The `local` of all ranks along `axes`, stacked in rank order, outside autograd."""
    return grid.transport.all_gather(dense(local.detach()), grid.communicator(axes))


def broadcast(tensor: Tensor, grid: ProcessGrid) -> None:
    """Overwrite a tensor by that of rank 0; all ranks of the grid call it."""
    if not tensor.numel() or grid.size == 1:
        return
    message = dense(tensor.detach())
    grid.transport.broadcast(message, grid.communicator(AXES))
    if message.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(message)


class _Gather(Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, plan: Plan, grid: ProcessGrid, tag: int, fill: float
    ) -> Tensor:
        ctx.movement = plan, grid, tag
        leaving = packed(local, plan.sends, grid)
        if plan.buffer_is_block:
            grid.transport.exchange((), leaving, tag).wait()
            return local.clone()
        buffer = empty(plan.buffer_shape, local)
        if not plan.covered:
            buffer.fill_(fill)
        landings = [(r.peer, _landing(buffer, r, grid)) for r in plan.receives]
        messages = grid.transport.exchange(landings, leaving, tag)
        for source, target in plan.own:
            buffer[target] = local[source]
        messages.wait()
        for route, (_, message) in zip(plan.receives, landings, strict=True):
            for place, part in _parts(buffer, route, message):
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
        block = empty(plan.block_shape, buffer)
        landings = landings_of(plan.sends, buffer, grid)
        leaving = packed(buffer, plan.receives, grid)
        messages = grid.transport.exchange(landings, leaving, tag)
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
        add_arrived(block, plan.sends, landings)
        return block

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan, grid, tag = ctx.movement
        return _Gather.apply(grads[0], plan, grid, tag, 0.0), None, None, None


class _SumOver(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, grid: ProcessGrid, axes: tuple[str, ...]) -> Tensor:
        ctx.movement = grid, axes
        return reduced(local, grid, axes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _SumOver.apply(grads[0], *ctx.movement), None, None


class _Parts(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, grid: ProcessGrid, axes: tuple[str, ...]) -> Tensor:
        ctx.movement = grid, axes
        return stacked(local, grid, axes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grid, axes = ctx.movement
        return _SumOver.apply(grads[0], grid, axes)[grid.communicator(axes).rank], None, None


class _Share(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, grid: ProcessGrid, axes: tuple[str, ...]) -> Tensor:
        ctx.movement = grid, axes
        return _same(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # The gradient comes from the plain world, which matters to second derivatives.
        grid, axes = ctx.movement
        return replicate(grads[0], grid, axes) / grid.topology.parts(axes), None, None


class _Replicate(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, grid: ProcessGrid, axes: tuple[str, ...]) -> Tensor:
        ctx.movement = grid, axes
        return _same(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # The gradient goes to the plain world.
        return share(sum_over(grads[0], *ctx.movement), *ctx.movement), None, None


def _same(tensor: Tensor) -> Tensor:
    """The tensor as what an autograd function returns; view_as() may give it other strides."""
    alias: Tensor = torch.ops.aten.alias(tensor)
    return alias


def dense(tensor: Tensor) -> Tensor:
    """A tensor whose memory holds just its elements, in order: itself, where that is so."""
    if _is_plain(tensor):
        return tensor
    return torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor)


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Memory for `shape`, with the channels last where those of `like` are."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(like.dim())
    # Strides tell it of a cropped tensor as well.
    if last is None or like.is_contiguous() or like.stride(1) != 1 or like.stride(-1) == 1:
        last = torch.contiguous_format
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=last)


def packed(tensor: Tensor, routes: Iterable[Route], grid: ProcessGrid) -> list[Message]:
    """For each route its rank, and its boxes of `tensor` as one contiguous message."""
    return [(route.peer, _pack(tensor, route, grid)) for route in routes]


def landings_of(routes: Iterable[Route], like: Tensor, grid: ProcessGrid) -> list[Message]:
    """For each route its rank, and memory for its message."""
    return [(r.peer, grid.transport.empty((r.size,), like)) for r in routes]


def add_arrived(tensor: Tensor, routes: Iterable[Route], landings: Iterable[Message]) -> None:
    """Add messages that have arrived to their boxes of `tensor`."""
    for route, (_, message) in zip(routes, landings, strict=True):
        for place, part in _parts(tensor, route, message):
            place += part


def _pack(tensor: Tensor, route: Route, grid: ProcessGrid) -> Tensor:
    """The boxes of a route as one contiguous message; a contiguous box travels uncopied."""
    if len(route.boxes) == 1:
        place = tensor[route.boxes[0]]
        if _is_plain(place):
            return place
        return grid.transport.empty(place.shape, place).copy_(place)
    message = grid.transport.empty((route.size,), tensor)
    for place, part in _parts(tensor, route, message):
        part.copy_(place)
    return message


def _landing(buffer: Tensor, route: Route, grid: ProcessGrid) -> Tensor:
    """Memory for a message: its place in the buffer where that is contiguous."""
    if len(route.boxes) == 1 and (place := buffer[route.boxes[0]]).is_contiguous():
        return place
    return grid.transport.empty((route.size,), buffer)


def _is_plain(tensor: Tensor) -> bool:
    """Whether the memory of a tensor holds just its elements, in order."""
    return (
        tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
    )


def _parts(tensor: Tensor, route: Route, message: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The boxes of a route in `tensor`, each with its part of the message."""
    start = 0
    for box in route.boxes:
        place = tensor[box]
        yield place, message.view(-1)[start : start + place.numel()].view(place.shape)
        start += place.numel()
