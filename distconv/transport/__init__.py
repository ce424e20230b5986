"""Bytes between ranks, and nothing else: one small interface, and a file for each carrier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from torch import Tensor

Message: TypeAlias = tuple[int, Tensor]
"""The other rank, and the contiguous tensor that leaves for it or arrives from it."""


class Request(Protocol):
    """Messages or a reduction under way."""

    def wait(self) -> None:
        """Return when all is complete and the tensors may be used."""


class Transport(Protocol):
    """What carries the messages of the ranks of one grid.

    `ticket` numbers the exchanges. All ranks start them in the order of the program, so an exchange
    has one number everywhere, and its messages cannot be taken for those of another in flight.
    Groups are what `ProcessGrid.communicator` returns; all their ranks call a collective together.
    Tensors are contiguous.
    """

    name: str

    def ticket(self) -> int:
        """The tag of the next exchange."""

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Memory for a message, of the type of `like` and on its device, with anything in it."""

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        """Start the messages of one exchange; receives are posted before anything is sent."""

    def all_reduce(self, tensor: Tensor, group: Any) -> Request:
        """Start adding up a tensor in place over the ranks of `group`.

        Half types and booleans are added up in float32 and int32, and rounded once.
        """

    def all_gather(self, tensor: Tensor, group: Any) -> Tensor:
        """The tensors of all ranks of `group`, stacked in rank order."""

    def broadcast(self, tensor: Tensor, group: Any) -> None:
        """Overwrite a tensor by that of the first rank of `group`."""
