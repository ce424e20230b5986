"""The interfaces of carriers and communicators, which move bytes between ranks."""

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
"""The types in which other types are summed."""

Message: TypeAlias = tuple[int, Tensor]
"""Another rank, and the contiguous tensor that is sent to it or received from it."""


class Request(Protocol):
    """Messages or a reduction that were started, for which a rank can wait."""

    def wait(self) -> None:
        """Return when the tensors may be used: messages have arrived, sums are complete.

        On a GPU work queued next on the current stream may use them; the host may return earlier.
        """


class ChainedRequest:
    """Several requests as one: `wait` waits for all of them, and then calls `then`."""

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
    ranks, and its messages are told apart from others in flight. On a GPU, the carrier reads a
    tensor after the work that is queued on the current stream when the exchange starts. The
    argument `group` is a communicator that `ProcessGrid.communicator` returned; all its ranks call
    a collective together. Tensors are contiguous.
    """

    name: str
    ordered: bool
    """Whether all ranks must start messages of every kind in one order, also of different groups: a
    GPU may process them one after the other, each waiting for other ranks."""

    def next_tag(self) -> int:
        """Return the tag of the next exchange, the same number on all ranks."""

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return uninitialised memory for a message, of the type of `like` and on its device."""

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        """Start one exchange: receive the messages `arriving`, and send the messages `leaving`."""

    def all_reduce(self, tensor: Tensor, group: Any) -> Request:
        """Start to sum a tensor in place over the ranks of `group`.

        Half types and booleans are summed in float32 and int32, and rounded once.
        """

    def all_gather(self, tensor: Tensor, group: Any) -> Tensor:
        """Return the tensors of all ranks of `group`, stacked in rank order."""

    def broadcast(self, tensor: Tensor, group: Any) -> None:
        """Overwrite a tensor by the tensor of the first rank of `group`."""


class StreamTransport(Transport, Protocol):
    """A carrier between accelerators: a stream waits for its messages, while the host goes on.

    These carriers alone have `ordered` True. An exchange queues its sends before its receives.
    """

    device: torch.device
    """The accelerator of this rank."""

    def check(self) -> None:
        """Raise `RuntimeError` if the carrier has met an error, such as a lost connection.

        Any thread may call it.
        """

    def close(self, abort: bool) -> None:
        """Close all connections: at once for `abort`, else when their work is done.

        Another thread may abort connections whose closing does not end.
        """


class Comparison:
    """A running all-reduce that compares numbers between ranks.

    The argument `most` is the result of `with_opposites` for this rank's numbers. The argument
    `wait` is a function that returns when the all-reduce has overwritten `most` by the maxima.
    """

    def __init__(self, wait: Callable[[], object], most: array[int]):
        self._wait, self._most = wait, most

    def wait(self) -> list[bool]:
        """Wait for the all-reduce; return for each number whether all ranks have the same."""
        self._wait()
        most = self._most
        half = len(most) // 2
        return list(map(eq, most[:half], map(neg, most[half:])))


def with_opposites(numbers: Sequence[int]) -> array[int]:
    """Return `numbers` and their negatives: one all-reduce with MAX tells whether ranks differ."""
    return array("q", (*numbers, *map(neg, numbers)))


class ObjectCommunicator(Protocol):
    """The methods for small objects that `ProcessGrid.comm` always has, named as in mpi4py.

    All ranks of the communicator call each method together, and in one order.
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
        """Return the value that the first rank passes, on every rank."""


class Communicator(ObjectCommunicator, Protocol):
    """A communicator for distconv's own small messages in host memory, all of one purpose."""

    ranks: tuple[int, ...]
    """The job's numbers of its ranks, in their order."""
    purpose: str

    def compare(self, numbers: Sequence[int]) -> Comparison:
        """Start to compare numbers of fewer than 64 bits between all ranks."""

    def subgroup(self, ranks: tuple[int, ...], purpose: str) -> Communicator:
        """Return a communicator for one purpose; `ranks`, numbers in the job, all call it."""

    def for_program(self) -> Any:
        """Return the communicator that a program gets as `ProcessGrid.comm`."""


# Tags of messages: the number of the exchange that a message belongs to.


_MOST = 32767
"""The number of tags before they repeat; every MPI has as many."""


def tags() -> Callable[[], int]:
    """Return a function of the tags 1, 2, ... of exchanges, which all ranks start in one order."""
    return chain.from_iterable(repeat(range(1, _MOST + 1))).__next__


def tags_behind(tag: int, reached: Iterable[int]) -> int:
    """Return by how many tags a rank at `tag` is behind the latest of `reached`; 0 for the latest.

    The latest is not the largest where some ranks have begun again at 1.
    """
    half = _MOST // 2
    return max((other - tag + half) % _MOST - half for other in reached)


# Pools of memory for messages, which later messages of the same size use again.
#
# Fresh memory costs page faults when it is first written, up to several times the cost of the
# message.


ByteArray = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

KEPT_BYTES = 64 * 2**20
"""Bytes kept for later messages."""
SMALL_BYTES = 64 * 2**10
"""The largest message, in bytes, whose memory malloc reuses itself, which is cheaper."""


def release_idle() -> None:
    """Free the memory that all pools of this process keep for later messages."""
    for pool in list(_POOLS):
        pool.release_idle()


class BufferPool:
    """Memory for messages on the CPU: it returns to the pool when its tensor is no longer used."""

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


# Sums of tensors whose type NCCL, gloo or MPI cannot sum, by conversion to one that it can.


_ADDED = {
    *(torch.float32, torch.float64),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
}
"""The types that NCCL, gloo and MPI sum."""

_WIDER = SUM_TYPES | {torch.int16: torch.int32}


class Summand(NamedTuple):
    """A tensor to be summed over ranks, in a type that NCCL, gloo and MPI can sum."""

    numbers: Tensor
    """The tensor itself, its real and imaginary parts, or a copy in a wider type."""
    into: Tensor | None
    """The tensor that the sum is copied to, where the numbers have memory of their own."""

    @classmethod
    def of(cls, tensor: Tensor, library: str) -> Summand:
        """Return the summand for a contiguous tensor; TypeError if `library` cannot sum it."""
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
        """Return a request for the sum of the tensor; `request` is the running sum of `numbers`."""
        if self.into is None:
            return request
        return ChainedRequest([request], partial(self.into.copy_, self.numbers))
