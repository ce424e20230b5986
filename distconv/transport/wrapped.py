"""A carrier around another one, for those that change or watch some of what it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from distconv.transport.interface import Message, Request, Transport


class WrappedTransport:
    """Hand everything to a carrier; see `Transport`. Subclasses override what they change."""

    def __init__(self, carrier: Transport):
        self.carrier, self.name, self.ordered = carrier, carrier.name, carrier.ordered

    def next_tag(self) -> int:
        """Return the tag of the next exchange."""
        return self.carrier.next_tag()

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return memory for a message."""
        return self.carrier.empty(shape, like)

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        """Start the messages of one exchange."""
        return self.carrier.exchange(arriving, leaving, tag)

    def all_reduce(self, tensor: Tensor, group: Any) -> Request:
        """Start adding up a tensor in place over the ranks of `group`."""
        return self.carrier.all_reduce(tensor, group)

    def all_gather(self, tensor: Tensor, group: Any) -> Tensor:
        """Return the tensors of all ranks of `group`, stacked in rank order."""
        return self.carrier.all_gather(tensor, group)

    def broadcast(self, tensor: Tensor, group: Any) -> None:
        """Overwrite a tensor by the one of the first rank of `group`."""
        self.carrier.broadcast(tensor, group)
