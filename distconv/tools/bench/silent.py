"""A carrier that sends nothing, to measure what is left of a step without its messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from distconv.transport.interface import Message, Request, Transport


class _Nothing:
    """A request that is complete."""

    def wait(self) -> None:
        """Return at once."""


class SilentTransport:
    """Leave out the messages of a carrier, or its reductions too; see `Transport`.

    What should have arrived is zero, and sums are this rank's part: the numbers are wrong, and the
    work of the host and the kernels is the same. Gathers and broadcasts are left to the carrier.
    """

    def __init__(self, carrier: Transport, reductions: bool):
        self._carrier, self._reductions = carrier, reductions
        self.name, self.ordered = carrier.name, carrier.ordered

    def next_tag(self) -> int:
        """Return the tag of the next exchange."""
        return self._carrier.next_tag()

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return memory for a message."""
        return self._carrier.empty(shape, like)

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        """Let zeros arrive."""
        for _, tensor in arriving:
            tensor.zero_()
        return _Nothing()

    def all_reduce(self, tensor: Tensor, group: Any) -> Request:
        """Add up as the carrier does, or take this rank's part for the sum."""
        return _Nothing() if self._reductions else self._carrier.all_reduce(tensor, group)

    def all_gather(self, tensor: Tensor, group: Any) -> Tensor:
        """Return the tensors of all ranks of `group`."""
        return self._carrier.all_gather(tensor, group)

    def broadcast(self, tensor: Tensor, group: Any) -> None:
        """Overwrite a tensor by the one of the first rank of `group`."""
        self._carrier.broadcast(tensor, group)
