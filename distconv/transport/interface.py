"""The interfaces of carriers and communicators, which move bytes between ranks."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from operator import eq, neg
from typing import Any, Protocol, TypeAlias

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
