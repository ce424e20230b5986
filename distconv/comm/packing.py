"""Messages in memory: boxes of a tensor packed into one, and buffers to receive them in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from distconv.geometry.plan import Route
from distconv.grid.interface import Grid
from distconv.transport.interface import Message


def resolved_contiguous(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory holds just its elements, in order: itself if possible."""
    if _is_resolved_contiguous(tensor):
        return tensor
    return torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor)


def has_channels_last(x: Tensor) -> bool:
    """Return whether the channels of planes or volumes are last in memory, also of a crop."""
    return (
        x.dim() in CHANNELS_LAST
        and not x.is_contiguous()
        and x.stride(1) == 1
        and x.stride(-1) != 1
    )


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""torch's words for it, by the number of dimensions."""


def fills_channels_last(x: Tensor) -> bool:
    """Return whether channels are last in memory, in which a block lies without gaps."""
    return has_channels_last(x) and x.is_contiguous(memory_format=CHANNELS_LAST[x.dim()])


def empty_in_format(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return uninitialised memory of this shape, with channels last where `like` has them last."""
    form = CHANNELS_LAST[like.dim()] if has_channels_last(like) else torch.contiguous_format
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=form)


def pack_messages(tensor: Tensor, routes: Iterable[Route], grid: Grid) -> list[Message]:
    """Return for each route its rank, and its boxes of `tensor` as one contiguous message."""
    return [(route.peer, _pack_route(tensor, route, grid)) for route in routes]


def receive_buffers(routes: Iterable[Route], like: Tensor, grid: Grid) -> list[Message]:
    """Return for each route its rank, and memory for its message."""
    return [(r.peer, grid.transport.empty((r.size,), like)) for r in routes]


def add_received(tensor: Tensor, routes: Iterable[Route], incoming: Iterable[Message]) -> None:
    """Add messages that have arrived to their boxes of `tensor`."""
    for route, (_, message) in zip(routes, incoming, strict=True):
        for place, part in route_boxes(tensor, route, message):
            place += part


def _pack_route(tensor: Tensor, route: Route, grid: Grid) -> Tensor:
    """Return the boxes of a route as one contiguous message; a contiguous box is not copied."""
    if len(route.boxes) == 1:
        place = tensor[route.boxes[0]]
        if _is_resolved_contiguous(place):
            return place
        return grid.transport.empty(place.shape, place).copy_(place)
    message = grid.transport.empty((route.size,), tensor)
    for place, part in route_boxes(tensor, route, message):
        part.copy_(place)
    return message


def receive_buffer(buffer: Tensor, route: Route, grid: Grid) -> Tensor:
    """Return memory for a message: its place in the buffer where that is contiguous."""
    if len(route.boxes) == 1 and (place := buffer[route.boxes[0]]).is_contiguous():
        return place
    return grid.transport.empty((route.size,), buffer)


def _is_resolved_contiguous(tensor: Tensor) -> bool:
    """Return whether the memory of a tensor holds just its elements, in order."""
    return (
        tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
    )


def route_boxes(tensor: Tensor, route: Route, message: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the boxes of a route in `tensor`, each with its part of the message."""
    if len(route.boxes) == 1:
        place = tensor[route.boxes[0]]
        yield place, message.view(place.shape)
        return
    start = 0
    for box in route.boxes:
        place = tensor[box]
        yield place, message.view(-1)[start : start + place.numel()].view(place.shape)
        start += place.numel()
