"""Bytes between ranks, and nothing else: one small interface, and a file for each carrier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

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
        """Start the messages of one exchange; receives are posted before anything is sent."""

    def all_reduce(self, tensor: Tensor, group: Any) -> Request:
        """Start adding up a tensor in place over the ranks of `group`.

        Half types and booleans are added up in float32 and int32, and rounded once.
        """

    def all_gather(self, tensor: Tensor, group: Any) -> Tensor:
        """Return the tensors of all ranks of `group`, stacked in rank order."""

    def broadcast(self, tensor: Tensor, group: Any) -> None:
        """Overwrite a tensor by the one of the first rank of `group`."""


class StreamTransport(Transport, Protocol):
    """A carrier by which streams of a GPU wait for messages, and the host does not.

    It is `ordered`, and no other is.
    """

    def check(self) -> None:
        """Raise `RuntimeError` where it has met with an error since messages were started.

        A thread other than the one that sends may call it.
        """
