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
    """Messages or a reduction under way."""

    def wait(self) -> None:
        """Return when the tensors may be used.

        On a GPU they may be used by the next work on the current stream; the host may return
        earlier.
        """


class Transport(Protocol):
    """A carrier of messages between the ranks of one grid.

    `next_tag` numbers the exchanges. All ranks start them in the order of the program, so an
    exchange has the same number on all, which keeps its messages apart from others under way. A
    tensor on a GPU is read after the work queued on the current stream when the exchange starts. A
    group is a result of `ProcessGrid.communicator`; all its ranks call a collective together.
    Tensors are contiguous.
    """

    name: str
    ordered: bool
    """Whether all ranks must start messages of every kind in one order, also of different groups: a
    GPU may process them one after the other, each waiting for other ranks."""

    def next_tag(self) -> int:
        """Return the tag of the next exchange, the same on all ranks."""

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return uninitialised memory for a message, of the type of `like` and on its device."""

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        """Start the messages of one exchange, which do not wait for each other."""

    def all_reduce(self, tensor: Tensor, group: Any) -> Request:
        """Start to sum a tensor in place over the ranks of `group`.

        Half types and booleans are summed in float32 and int32, and rounded once.
        """

    def all_gather(self, tensor: Tensor, group: Any) -> Tensor:
        """Return the tensors of all ranks of `group`, stacked in rank order."""

    def broadcast(self, tensor: Tensor, group: Any) -> None:
        """Overwrite a tensor by the tensor of the first rank of `group`."""


class StreamTransport(Transport, Protocol):
    """A carrier for which streams of an accelerator wait, and not the host.

    It is `ordered`, and no other is. In a batch of messages sends come first.
    """

    device: torch.device
    """The accelerator of this rank."""

    def check(self) -> None:
        """Raise `RuntimeError` where the carrier has met an error since messages were started.

        A thread other than the sending one may call it.
        """

    def close(self, abort: bool) -> None:
        """Close all connections, when their work is done or at once; nothing is sent afterwards."""


_MOST = 32767
"""The number of tags before they repeat; every MPI has as many."""


class Tags:
    """The numbers of exchanges, which all ranks start in one order; the first is 1."""

    def __init__(self) -> None:
        self.last = 0

    def next(self) -> int:
        """Return the tag of the next exchange."""
        self.last = self.last % _MOST + 1
        return self.last


class Comparison:
    """A comparison of numbers among ranks, under way.

    `most` holds this rank's numbers and their negatives; `wait` makes them the maxima over ranks.
    """

    def __init__(self, wait: Callable[[], object], most: array[int]):
        self._wait, self._most = wait, most

    def wait(self) -> list[bool]:
        """Wait for the numbers of all ranks; return for each whether it is equal on all."""
        self._wait()
        most = self._most
        half = len(most) // 2
        return list(map(eq, most[:half], map(neg, most[half:])))


def with_opposites(numbers: Sequence[int]) -> array[int]:
    """Return the numbers followed by their negatives, whose maxima over ranks are extremes."""
    return array("q", (*numbers, *map(neg, numbers)))


class ObjectCommunicator(Protocol):
    """The methods of mpi4py's communicators that `ProcessGrid.comm` always has: small objects.

    All of its ranks call each method together, and in one order.
    """

    @property
    def rank(self) -> int:
        """Return this rank's number among them."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""

    def allgather(self, value: Any, /) -> list[Any]:
        """Return the values of all ranks, in rank order."""

    def bcast(self, value: Any = None, /) -> Any:
        """Return the first rank's value."""


class Communicator(ObjectCommunicator, Protocol):
    """Ranks of the job that exchange small messages on the host, for one purpose."""

    ranks: tuple[int, ...]
    """The job's numbers of its ranks, in their order."""
    purpose: str

    def compare(self, numbers: Sequence[int]) -> Comparison:
        """Start to compare numbers of fewer than 64 bits with the other ranks' numbers."""

    def subgroup(self, ranks: tuple[int, ...], purpose: str) -> Communicator:
        """Return a communicator of some ranks, by their numbers in the job. Those call it."""

    def for_program(self) -> Any:
        """Return the object for `ProcessGrid.comm`."""
