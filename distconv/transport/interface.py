"""The interfaces of carriers, for tensors, and of communicators, for small Python objects."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, repeat
from math import prod
from operator import eq, neg
from typing import Any, NamedTuple, Protocol, TypeAlias
from weakref import WeakSet, ref

import numpy as np
import torch
from torch import Tensor

SUM_TYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.bool: torch.int32}
"""For types that are summed in a wider type, the wider type."""

Message: TypeAlias = tuple[int, Tensor]
"""A rank, and a contiguous tensor: the data to send to the rank, or memory for data from it."""


class Request(Protocol):
    """A started exchange of messages or a started reduction, for which a rank can wait."""

    def wait(self) -> None:
        """Wait until all messages have arrived and all sums are complete.

        Then the tensors may be read and written. On a GPU the host may return earlier; then only
        work queued next on the current stream may use the tensors.
        """


class ChainedRequest:
    """A request that combines several: `wait` waits for all `requests`, and then calls `then`."""

    def __init__(
        self, requests: Sequence[Request] = (), then: Callable[[], object] = lambda: None
    ) -> None:
        self._requests, self._then = requests, then

    def wait(self) -> None:
        for request in self._requests:
            request.wait()
        self._then()


class Transport(Protocol):
    """A carrier of messages between the ranks of one grid.

    All ranks start exchanges in the order of the program. So an exchange has the same tag on all
    ranks, by which its messages are distinguished from others in flight. On a GPU, the carrier
    reads a tensor after the work that is queued on the current stream when the exchange starts. The
    argument `group` is a communicator that `ProcessGrid.communicator` returned. All ranks of
    `group` call a collective together. Tensors are contiguous.
    """

    name: str
    ordered: bool
    """Whether all ranks must start all messages and reductions in the same order, also those of
    different groups: a GPU may process them one after the other, each waiting for other ranks."""

    def next_tag(self) -> int:
        """Return the tag of the next exchange, the same number on all ranks."""

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return uninitialised memory for a message, of the type of `like` and on its device."""

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        """Start to receive the messages `arriving` and to send the messages `leaving`."""

    def all_reduce(self, tensor: Tensor, group: Any) -> Request:
        """Start to sum `tensor` in place over the ranks of `group`. Collective over `group`.

        Half types are summed in float32 and rounded once, booleans are summed in int32.
        """

    def all_gather(self, tensor: Tensor, group: Any) -> Tensor:
        """Return the tensors of all ranks of `group`, stacked in rank order. Collective."""

    def broadcast(self, tensor: Tensor, group: Any) -> None:
        """Overwrite `tensor` by that of the first rank of `group`. Collective over `group`."""


class StreamTransport(Transport, Protocol):
    """A carrier between accelerators: a stream waits for its messages, while the host continues.

    Only stream carriers have `ordered` True. An exchange queues its sends before its receives.
    """

    device: torch.device
    """The accelerator of this rank."""

    def check(self) -> None:
        """Raise `RuntimeError` if the carrier has had an error, such as a lost connection.

        Any thread may call this method.
        """

    def close(self, abort: bool) -> None:
        """Close all connections: at once if `abort`, otherwise after their messages are complete.

        If that takes too long, another thread may call `close(abort=True)` meanwhile.
        """


class Comparison:
    """A started all-reduce that compares integers between ranks.

    The argument `most` has this rank's integers, followed by their negatives. The argument `wait`
    is a function that returns when the all-reduce has overwritten `most` by the maxima over the
    ranks.
    """

    def __init__(self, wait: Callable[[], object], most: array[int]):
        self._wait, self._most = wait, most

    def wait(self) -> list[bool]:
        """Wait for the all-reduce, and return for each integer whether it is equal on all ranks."""
        self._wait()
        most = self._most
        half = len(most) // 2
        return list(map(eq, most[:half], map(neg, most[half:])))


def with_opposites(numbers: Sequence[int]) -> array[int]:
    """Return `numbers` and their negatives, whose maxima show whether ranks differ."""
    return array("q", (*numbers, *map(neg, numbers)))


class ObjectCommunicator(Protocol):
    """The methods of `ProcessGrid.comm` for small Python objects, named as in mpi4py.

    All ranks of the communicator call the methods together, in the same order.
    """

    @property
    def rank(self) -> int:
        """Return this rank's number in the communicator."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""

    def allgather(self, value: Any, /) -> list[Any]:
        """Return the values of all ranks, in rank order."""

    def bcast(self, value: Any = None, /) -> Any:
        """Return the `value` of the first rank, on every rank."""


class Communicator(ObjectCommunicator, Protocol):
    """A communicator for small messages of distconv, separate for each `purpose`."""

    ranks: tuple[int, ...]
    """The numbers in the job of the communicator's ranks, in rank order."""
    purpose: str

    def compare(self, numbers: Sequence[int]) -> Comparison:
        """Start to compare integers of fewer than 64 bits between all ranks. Collective."""

    def subgroup(self, ranks: tuple[int, ...], purpose: str) -> Communicator:
        """Return a communicator for `purpose`. Collective over `ranks`, numbers in the job."""

    def for_program(self) -> Any:
        """Return the communicator that programs get, as `ProcessGrid.comm`."""


# Tags of messages: the number of the exchange that a message belongs to.


_LAST_TAG = 32767
"""The number of tags before tags repeat: the smallest limit that the MPI standard allows."""


def tags() -> Callable[[], int]:
    """Return a function whose calls return the tags 1, 2, ... 32767, and then 1 again."""
    return chain.from_iterable(repeat(range(1, _LAST_TAG + 1))).__next__


def tags_behind(tag: int, reached: Iterable[int]) -> int:
    """Return the number of exchanges by which a rank is behind the most advanced rank.

    `tag` is the last tag of the rank, and `reached` has the last tags of all ranks. The most
    advanced rank may have a small tag, as tags begin at 1 again after the largest.
    """
    half = _LAST_TAG // 2
    return max((other - tag + half) % _LAST_TAG - half for other in reached)


# Pools of memory for messages, which later messages of the same size use again.
#
# Newly allocated memory causes page faults when it is first written, which may take several times
# as long as the message.


ByteArray = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

KEPT_BYTES = 64 * 2**20
"""The largest number of bytes that a pool keeps for later messages."""
SMALL_BYTES = 64 * 2**10
"""The size in bytes up to which messages get memory from malloc, which is faster than a pool."""


def release_idle() -> None:
    """Free the memory that all pools of this process keep for later messages."""
    for pool in list(_POOLS):
        pool.release_idle()


class BufferPool:
    """A pool of CPU memory for messages: memory returns to the pool when no tensor uses it."""

    def __init__(self) -> None:
        _POOLS.add(self)
        self._idle: defaultdict[int, list[ByteArray]] = defaultdict(list)
        self._idle_bytes = 0
        self._lent: dict[int, tuple[ref[ByteArray], ByteArray]] = {}

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return an uninitialised, contiguous CPU tensor of `shape`, of the type of `like`."""
        size = prod(shape) * like.element_size()
        if size <= SMALL_BYTES:
            return like.new_empty(shape)
        stack = self._idle.get(size)
        if stack:
            memory = stack.pop()
            self._idle_bytes -= size
            if not stack:
                del self._idle[size]
        else:
            memory = torch.empty(size, dtype=torch.uint8, device="cpu").numpy()
        # The tensor and all that share its memory keep this view alive.
        view = memory[:]
        use = ref(view, self._take_back)
        self._lent[id(use)] = use, memory
        message = torch.frombuffer(view, dtype=like.dtype)
        return message if len(shape) == 1 else message.view(shape)

    def release_idle(self) -> None:
        """Free the memory that this pool keeps for later messages."""
        self._idle.clear()
        self._idle_bytes = 0

    def _take_back(self, use: ref[ByteArray]) -> None:
        _, memory = self._lent.pop(id(use))
        if self._idle_bytes + memory.nbytes > KEPT_BYTES:
            self.release_idle()
        if memory.nbytes <= KEPT_BYTES:
            self._idle[memory.nbytes].append(memory)
            self._idle_bytes += memory.nbytes


_POOLS: WeakSet[BufferPool] = WeakSet()
"""All pools of the process."""


# Sums of tensors whose type NCCL, gloo or MPI cannot sum, by conversion to another type.


_ADDED = {
    *(torch.float32, torch.float64),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
}
"""The types that NCCL, gloo and MPI can all sum."""

_WIDER = SUM_TYPES | {torch.int16: torch.int32}


class Summand(NamedTuple):
    """A tensor to be summed over ranks, converted to a type that NCCL, gloo and MPI can sum."""

    numbers: Tensor
    """The tensor itself, its real and imaginary parts, or a copy in a wider type."""
    into: Tensor | None
    """The tensor to which to copy the sum; None if `numbers` shares its memory."""

    @classmethod
    def of(cls, tensor: Tensor, library: str) -> Summand:
        """Return the summand of a contiguous tensor; raise TypeError if `library` cannot sum it."""
        if tensor.dtype in _ADDED:
            return cls(tensor, None)
        if tensor.dtype in _WIDER:
            return cls(tensor.to(_WIDER[tensor.dtype]), tensor)
        if tensor.dtype in (torch.complex64, torch.complex128):
            return cls(torch.view_as_real(tensor), None)
        raise TypeError(
            f"{library} cannot sum {tensor.dtype}; convert the tensor, for example x.float()"
        )

    def arriving(self, request: Request) -> Request:
        """Return a request for the sum in the original tensor; `request` is that of `numbers`."""
        if self.into is None:
            return request
        return ChainedRequest([request], partial(self.into.copy_, self.numbers))
