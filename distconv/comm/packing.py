"""Packing of messages: boxes of a tensor are packed into one buffer, and unpacked from another.

A kernel on an accelerator takes longer to launch than to copy a halo, and so does a small copy on a
CPU. So one indexed copy packs all messages of an exchange, and another one unpacks them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from distconv.device.kinds import for_later_calls, remembered, thresholds
from distconv.device.streams import keep_if_captured
from distconv.geometry.plan import Plan, Route, Slices
from distconv.grid.interface import Grid
from distconv.torch_private import is_zero_tensor
from distconv.transport.interface import SMALL_BYTES, Message


def resolved_contiguous(tensor: Tensor) -> Tensor:
    """Return `tensor`, or a contiguous copy with lazy conjugation and negation resolved."""
    lazy = tensor.is_conj() or tensor.is_neg() or is_zero_tensor(tensor)
    if tensor.is_contiguous() and not lazy:
        return tensor
    return torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor)


def has_channels_last(x: Tensor) -> bool:
    """Return whether `x`, a 4-d or 5-d tensor or a crop of one, has channels last in memory."""
    return (
        x.dim() in CHANNELS_LAST
        and not x.is_contiguous()
        and x.stride(1) == 1
        and x.stride(-1) != 1
    )


def is_without_gaps(x: Tensor) -> bool:
    """Return whether a tensor is contiguous in one of torch's memory formats."""
    form = CHANNELS_LAST.get(x.dim())
    return x.is_contiguous() or (form is not None and x.is_contiguous(memory_format=form))


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""torch's memory formats with channels last, by the number of dimensions."""


def empty_in_format(shape: tuple[int, ...], like: Tensor, last: bool | None = None) -> Tensor:
    """Return an uninitialised tensor of `shape`, with channels last if `like` has channels last.

    `last` states whether `like` has channels last; by default its strides decide.
    """
    last = has_channels_last(like) if last is None else last
    form = CHANNELS_LAST[like.dim()] if last else torch.contiguous_format
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=form)


@remembered
def filled(
    device: torch.device, shape: tuple[int, ...], value: float, dtype: torch.dtype
) -> Tensor:
    """Return a tensor filled with `value`, which is cached and must not be written to."""
    return torch.full(shape, value, dtype=dtype, device=device)


class Places(NamedTuple):
    """The memory from which a plan's messages are sent, or into which they are received.

    A message whose elements are contiguous in the tensor's memory is sent or received in place. All
    other messages are concatenated in one buffer. The object serves all tensors of one shape and
    memory format.
    """

    routes: Sequence[Route]
    direct: tuple[int, ...]
    """The numbers of the routes whose messages are in the tensor's memory."""
    order: tuple[int, ...]
    """The numbers of the routes whose messages are in the buffer, in the order of the buffer."""
    peers: tuple[int, ...]
    """The rank at the other end of each route in `order`."""
    sizes: list[int]
    """The number of elements of each message in the buffer."""
    total: int
    """The number of elements of the buffer."""
    indices: tuple[Tensor, ...] = ()
    """For each unit of the buffer, its index among the units of the tensor's memory. A unit is a
    run of consecutive elements. Each tensor of indices is for one kernel. Empty if boxes are copied
    one by one."""
    units: list[int] = []
    """The number of units of each message in the buffer."""
    counts: list[int] = []
    """The number of indices for each kernel."""
    shape: tuple[int, ...] = ()
    """The shape of the buffer as an array of units."""
    memory: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """The shape and the strides of the tensor's memory as an array of units."""


def places_in(
    tensor: Tensor, plan: Plan, grid: Grid, *, of_block: bool, sums: bool = False
) -> Places:
    """Return the memory of a plan's messages, for tensors like `tensor`; cached in the plan.

    Parameters
    ----------
    tensor: the rank's block if `of_block`, which has the boxes of the routes `plan.sends`; else its
        buffer, which has the boxes of `plan.receives`.
    sums: whether messages are added to the tensor. Then all messages are in the buffer.
    """
    accelerator = grid.computes_on_gpu
    key = tensor.stride(), tensor.device, accelerator, of_block, sums
    found: Places | None = plan.kept.get(key)
    if found is None:
        routes = plan.sends if of_block else plan.receives
        apart = sums and accelerator
        found = _arranged(routes, None if sums else tensor.stride(), apart)
        with for_later_calls():
            found = _indexed(found, tensor, thresholds(accelerator).most_indices, apart)
        plan.kept[key] = found
    if accelerator and found.indices:
        keep_if_captured(tensor.device, *found.indices)
    return found


def places_apart(plan: Plan, grid: Grid, *, of_block: bool, sums: bool) -> Places:
    """Return the memory of a plan's messages if all of them are in a buffer; cached in the plan.

    `of_block` and `sums` are as in `places_in`. The result has no indices.
    """
    accelerator = grid.computes_on_gpu
    key = accelerator, of_block, sums
    found: Places | None = plan.kept.get(key)
    if found is None:
        routes = plan.sends if of_block else plan.receives
        found = plan.kept[key] = _arranged(routes, None, sums and accelerator)
    return found


def _arranged(routes: Sequence[Route], stride: Sequence[int] | None, apart: bool) -> Places:
    """Return the memory of the messages of `routes`, without indices.

    Parameters
    ----------
    stride: the strides of the tensor from or into which messages may be sent in place; None if all
        messages must be in the buffer.
    apart: whether to order the buffer so that messages without common elements are adjacent.
    """
    direct = [
        i
        for i, route in enumerate(routes)
        if stride is not None and _Span.of(route.boxes[0], stride).run == route.size
    ]
    order = _in_rounds(routes) if apart else [i for i in range(len(routes)) if i not in direct]
    sizes = [routes[i].size for i in order]
    peers = tuple(routes[i].peer for i in order)
    return Places(routes, tuple(direct), tuple(order), peers, sizes, sum(sizes))


def _in_rounds(routes: Sequence[Route]) -> list[int]:
    """Return the numbers of all routes, ordered so that few kernels can add the routes' messages.

    One kernel must not add to an element twice, as the order of additions on an accelerator varies.
    So routes are put into rounds; no two routes of a round have elements in common.
    """
    rounds: list[list[int]] = []
    for i, route in enumerate(routes):
        for other in rounds:
            if not any(_overlap(route.boxes, routes[j].boxes) for j in other):
                other.append(i)
                break
        else:
            rounds.append([i])
    return [i for chosen in rounds for i in chosen]


def _overlap(some: Sequence[Slices], others: Sequence[Slices]) -> bool:
    """Return whether a box of `some` has elements in common with a box of `others`."""
    return any(
        all(s.start < t.stop and t.start < s.stop for s, t in zip(a, b, strict=True))
        for a in some
        for b in others
    )


def _indexed(places: Places, tensor: Tensor, most: int, apart: bool) -> Places:
    """Return `places` with indices if one indexed copy is faster than a copy of each box.

    `tensor` is the block or buffer that has the boxes, and `most` the largest number of indices.
    `apart` is true if no kernel may use an element twice.
    """
    boxes = [box for i in places.order for box in places.routes[i].boxes]
    if len(boxes) < 2:
        return places
    spans = [_Span.of(box, tensor.stride()) for box in boxes]
    unit = gcd(*(n for s in spans for n in (s.start, s.run, *(step for _, step in s.steps))))
    if places.total > unit * most:
        return places
    groups: list[list[int]] = [[]]
    for i, box in enumerate(boxes):
        if apart and _overlap([box], [boxes[j] for j in groups[-1]]):
            groups.append([])
        groups[-1].append(i)
    indices = [torch.cat([spans[i].units(unit) for i in group]) for group in groups]
    reach, count = max(int(index.max()) for index in indices) + 1, places.total // unit
    row = (unit,) if unit > 1 else ()
    return places._replace(
        indices=tuple(index.to(tensor.device) for index in indices),
        units=[n // unit for n in places.sizes],
        counts=[len(index) for index in indices],
        shape=(count, *row),
        memory=((reach, *row), (*row, 1)),
    )


class _Span(NamedTuple):
    """The elements of a box in memory: runs of consecutive elements at regular distances."""

    start: int
    run: int
    steps: tuple[tuple[int, int], ...]
    """For each dimension of the array of runs, its length and its stride in elements."""

    @classmethod
    def of(cls, box: Slices, stride: Sequence[int]) -> _Span:
        """Return the span of a box of a tensor with these strides."""
        sides = [(s.stop - s.start, n) for s, n in zip(box, stride, strict=True)]
        steps, run = [side for side in sides if side[0] > 1], 1
        while steps and steps[-1][1] == run:
            run *= steps.pop()[0]
        return cls(sum(s.start * n for s, n in zip(box, stride, strict=True)), run, tuple(steps))

    def units(self, unit: int) -> Tensor:
        """Return the indices in memory of the box's units of `unit` elements, in box order."""
        numbers = torch.tensor([self.start // unit], device="cpu")
        for n, distance in (*self.steps, (self.run // unit, unit)):
            along = torch.arange(n, device="cpu") * (distance // unit)
            numbers = (numbers[:, None] + along).flatten()
        return numbers


_INDEXED = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.complex128, torch.complex64),
    }
)
"""The element types for which torch has indexed copies and sums."""


def pack_messages(
    tensor: Tensor, plan: Plan, grid: Grid, *, of_block: bool = True
) -> list[Message]:
    """Return the messages that a rank sends: for each route, the peer and a contiguous tensor.

    `tensor` is the rank's block if `of_block`, else its buffer, from which gradients are sent. A
    message whose elements are contiguous in memory is not copied.
    """
    if not (plan.sends if of_block else plan.receives):
        return []
    if tensor.is_conj() or tensor.is_neg() or is_zero_tensor(tensor):
        tensor = torch.empty_like(tensor).copy_(tensor)
    places = places_in(tensor, plan, grid, of_block=of_block)
    # The pool keeps no memory for small messages.
    small = places.total * tensor.element_size() <= SMALL_BYTES
    if places.indices and tensor.dtype in _INDEXED:
        memory = tensor.as_strided(*places.memory)
        if small:
            packed = memory.index_select(0, places.indices[0])
        else:
            packed = grid.transport.empty(places.shape, tensor)
            torch.index_select(memory, 0, places.indices[0], out=packed)
        messages: Sequence[Tensor] = _divided(packed, places.units)
    else:
        messages = _copied(tensor, places, grid, small)
    return _all_messages(places, tensor, messages)


def _copied(tensor: Tensor, places: Places, grid: Grid, small: bool) -> Sequence[Tensor]:
    """Return the messages of `places.order`, copied box by box from `tensor` into new memory."""
    if small and len(places.order) == 1:
        boxes = places.routes[places.order[0]].boxes
        if len(boxes) == 1:
            return [tensor[boxes[0]].clone(memory_format=torch.contiguous_format)]
    if not places.order:
        return ()
    buffer = grid.transport.empty((places.total,), tensor)
    messages = _divided(buffer, places.sizes)
    for place, part in _boxes(tensor, places, messages):
        part.copy_(place)
    return messages


def _all_messages(
    places: Places, tensor: Tensor | None, buffered: Sequence[Tensor]
) -> list[Message]:
    """Return pairs of peer and message for all routes, in the order of `places.routes`.

    The messages of `places.direct` are views of `tensor`, if given; all others are `buffered`.
    """
    messages = list(zip(places.peers, buffered, strict=True))
    if tensor is not None:
        for i in places.direct:  # from the first route to the last
            route = places.routes[i]
            # The view is not cached, as `tensor` may have another address in a replay of the call.
            messages.insert(i, (route.peer, tensor[route.boxes[0]].view(-1)))
    return messages


def _boxes(
    tensor: Tensor, places: Places, buffered: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for each box of the messages `buffered`, its view of `tensor` and of its message."""
    for i, message in zip(places.order, buffered, strict=True):
        own = [tensor[box] for box in places.routes[i].boxes]
        for place, part in zip(own, _divided(message, [x.numel() for x in own]), strict=True):
            yield place, part.view(place.shape)


def _divided(flat: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """Return views of consecutive sections of `flat`, of `sizes` along its first dimension."""
    return (flat,) if len(sizes) == 1 else torch.split_with_sizes(flat, sizes)


class ReceiveBuffers:
    """Memory to receive messages: a tensor for messages that are contiguous there, else a buffer.

    Parameters
    ----------
    places: the memory of the messages of a plan.
    like: a tensor of the element type and device of the messages.
    into: the tensor into which messages may be received in place, for which `places` was made; or
        None.
    """

    __slots__ = ("_buffer", "_places", "messages")

    def __init__(self, places: Places, like: Tensor, grid: Grid, into: Tensor | None = None):
        self._places = places
        buffered: Sequence[Tensor] = ()
        if places.order:
            self._buffer = grid.transport.empty((places.total,), like)
            buffered = _divided(self._buffer, places.sizes)
        self.messages = _all_messages(places, into, buffered)

    def copy_to(self, tensor: Tensor) -> None:
        """Copy the received messages in the buffer to their boxes of `tensor`."""
        places = self._places
        if places.indices and tensor.dtype in _INDEXED:
            memory = tensor.as_strided(*places.memory)
            memory.index_copy_(0, places.indices[0], self._buffer.view(places.shape))
        elif places.order:
            buffered = _divided(self._buffer, places.sizes)
            for place, part in _boxes(tensor, places, buffered):
                place.copy_(part)

    def add_to(self, tensor: Tensor, places: Places) -> None:
        """Add the received messages in the buffer to their boxes of `tensor`, given by `places`."""
        if places.indices and tensor.dtype in _INDEXED:
            memory, summands = tensor.as_strided(*places.memory), self._buffer.view(places.shape)
            parts = _divided(summands, places.counts)
            for index, part in zip(places.indices, parts, strict=True):
                memory.index_add_(0, index, part)
        elif places.order:
            buffered = _divided(self._buffer, places.sizes)
            for place, part in _boxes(tensor, places, buffered):
                place.add_(part)
