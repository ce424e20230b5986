"""Bytes between ranks, and nothing else: the interfaces of carriers and communicators."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from operator import eq, neg
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

SUM_TYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.bool: torch.int32}
"""For types that are not added up as they are, the type in which they are."""

Message: TypeAlias = tuple[int, Tensor]
"""Another rank, and the contiguous tensor that leaves for it or arrives from it."""


class Request(Protocol):
    """Messages or a reduction under way."""

    def wait(self) -> None:
        """Return when all is complete for what the program does next, which may use the tensors.

        On a GPU that is the work given to the current stream next; the host may return earlier.
        """


class Transport(Protocol):
    """A carrier of messages between the ranks of one grid, which wait for them in one order.

    `next_tag` numbers the exchanges. All ranks start them in the order of the program, so an
    exchange has one number everywhere, and its messages cannot be taken for those of another in
    flight. A tensor on a GPU is read as the current stream has written it when it comes to the
    exchange. A group is what `ProcessGrid.communicator` returns; all its ranks call a collective
    together. Tensors are contiguous.
    """

    name: str
    ordered: bool
    """Whether all ranks have to start messages of every kind in one order, also those of different
    groups: a GPU may work them off one after the other, each of which waits for other ranks."""

    def next_tag(self) -> int:
        """Return the tag of the next exchange, the same on all ranks."""

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return uninitialised memory for a message, of the type of `like` and on its device."""

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        """Start the messages of one exchange, none of which waits for another."""

    def all_reduce(self, tensor: Tensor, group: Any) -> Request:
        """Start adding up a tensor in place over the ranks of `group`.

        Half types and booleans are added up in float32 and int32, and rounded once.
        """

    def all_gather(self, tensor: Tensor, group: Any) -> Tensor:
        """Return the tensors of all ranks of `group`, stacked in rank order."""

    def broadcast(self, tensor: Tensor, group: Any) -> None:
        """Overwrite a tensor by the one of the first rank of `group`."""


class StreamTransport(Transport, Protocol):
    """A carrier by which streams of an accelerator wait for messages, and the host does not.

    It is `ordered`, and no other is. In a batch of messages those that leave come first.
    """

    device: torch.device
    """The accelerator of this rank."""

    def check(self) -> None:
        """Raise `RuntimeError` where it has met with an error since messages were started.

        A thread other than the one that sends may call it.
        """

    def close(self, abort: bool) -> None:
        """End all connections, when their work is done, or at once; nothing is sent afterwards."""


_MOST = 32767
"""How many tags there are before they begin again; every MPI has as many."""


class Tags:
    """The numbers of exchanges, which all ranks start in one order.

    Attributes
    ----------
    last: the tag of the latest exchange; 0 before the first.
    """

    def __init__(self) -> None:
        self.last = 0

    def next(self) -> int:
        """Return the tag of the next exchange."""
        self.last = self.last % _MOST + 1
        return self.last


class Comparison:
    """Numbers that are being compared among ranks.

    Parameters
    ----------
    wait: returns when `most` is there.
    most: the numbers of this rank, followed by the same with the other sign; then, in the same
        memory, the largest of each over the ranks.
    """

    def __init__(self, wait: Callable[[], object], most: array[int]):
        self._wait, self._most = wait, most

    def wait(self) -> list[bool]:
        """Return, when every rank has brought its numbers, which of them are the same on all."""
        self._wait()
        most = self._most
        half = len(most) // 2
        return list(map(eq, most[:half], map(neg, most[half:])))


def with_opposites(numbers: Sequence[int]) -> array[int]:
    """Return numbers, and the same with the other sign: their maxima over ranks tell extremes."""
    return array("q", (*numbers, *map(neg, numbers)))


class ObjectCommunicator(Protocol):
    """The part of mpi4py's communicators that `ProcessGrid.comm` has in any case: small objects.

    All of them call each method together, and in one order.
    """

    @property
    def rank(self) -> int:
        """Return this rank's number among them."""

    @property
    def size(self) -> int:
        """Return how many they are."""

    def allgather(self, value: Any, /) -> list[Any]:
        """Return what every rank passes, in rank order."""

    def bcast(self, value: Any = None, /) -> Any:
        """Return what the first rank passes."""


class Communicator(ObjectCommunicator, Protocol):
    """Ranks of the job that exchange small messages on the host, for one purpose."""

    ranks: tuple[int, ...]
    """All of them by their numbers in the job, in their order."""
    purpose: str

    def all_gather_numbers(self, numbers: Sequence[int]) -> np.ndarray:
        """Return the numbers of every rank, of shape (size, len(numbers)), in 64 bits."""

    def compare(self, numbers: Sequence[int]) -> Comparison:
        """Start to compare numbers of fewer than 64 bits with those of the other ranks."""

    def subgroup(self, ranks: tuple[int, ...], purpose: str) -> Communicator:
        """Return a communicator of some of the ranks, in numbers of the job; those call it."""

    def for_program(self) -> Any:
        """Return what `ProcessGrid.comm` gives to programs."""
