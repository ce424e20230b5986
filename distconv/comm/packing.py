"""Memory of messages: boxes of a tensor packed into one message, and buffers to receive into."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from distconv.geometry.plan import Route
from distconv.grid.interface import Grid
from distconv.torch_private import is_zero_tensor
from distconv.transport.buffers import SMALL_BYTES
from distconv.transport.interface import Message


def resolved_contiguous(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor of the same values, without lazy conjugation or negation."""
    if _is_resolved_contiguous(tensor):
        return tensor
    return torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor)


def has_channels_last(x: Tensor) -> bool:
    """Return whether a 4-d or 5-d tensor, or a crop of one, has its channels last in memory."""
    return (
        x.dim() in CHANNELS_LAST
        and not x.is_contiguous()
        and x.stride(1) == 1
        and x.stride(-1) != 1
    )


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""torch's memory formats with channels last, by the number of dimensions."""


def empty_in_format(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return uninitialised memory of this shape, in channels last if `like` is in channels last."""
    form = CHANNELS_LAST[like.dim()] if has_channels_last(like) else torch.contiguous_format
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=form)


def pack_messages(tensor: Tensor, routes: Iterable[Route], grid: Grid) -> list[Message]:
    """Return, for each route, its rank and a message: the route's boxes of `tensor`, contiguous.

    A box that is contiguous in memory is not copied.
    """
    empty, leaving = grid.transport.empty, []
    for route in routes:
        if len(route.boxes) == 1:
            message = tensor[route.boxes[0]]
            if not _is_resolved_contiguous(message):
                # The pool keeps no memory for small messages.
                if message.nbytes <= SMALL_BYTES:
                    message = message.clone(memory_format=torch.contiguous_format)
                else:
                    message = empty(route.shape, tensor).copy_(message)
        else:
            message = empty(route.shape, tensor)
            for place, part in route_boxes(tensor, route, message):
                part.copy_(place)
        leaving.append((route.peer, message))
    return leaving


def receive_buffers(
    routes: Iterable[Route], like: Tensor, grid: Grid, into: Tensor | None = None
) -> list[Message]:
    """Return, for each route, its rank and uninitialised memory for its message.

    If the route has a single box, and this box of `into` is contiguous, the memory is this box.
    Otherwise it is new memory, of the type and device of `like`.
    """
    arriving = []
    for route in routes:
        place = None if into is None or len(route.boxes) > 1 else into[route.boxes[0]]
        if place is None or not place.is_contiguous():
            place = grid.transport.empty(route.shape, like)
        arriving.append((route.peer, place))
    return arriving


def route_boxes(tensor: Tensor, route: Route, message: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each box of a route in `tensor`, with the piece of the message that belongs there."""
    if len(route.boxes) == 1:
        yield tensor[route.boxes[0]], message
        return
    start = 0
    for box in route.boxes:
        place = tensor[box]
        yield place, message[start : start + place.numel()].view(place.shape)
        start += place.numel()


def _is_resolved_contiguous(tensor: Tensor) -> bool:
    """Return whether a tensor's memory holds its values as they are, in order, without gaps."""
    return (
        tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not is_zero_tensor(tensor)
    )
