"""A carrier that sends nothing, to measure what is left of a step without its messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distconv.transport.interface import Message, Request, Transport
from distconv.transport.watched import WrappedTransport


class _Nothing:
    """A request that is complete."""

    def wait(self) -> None:
        """Return at once."""


class SilentTransport(WrappedTransport):
    """Leave out the messages between neighbours, or reductions and gathers too; see `Transport`.

    What should have arrived is zero, sums are this rank's part, and all ranks are taken to have
    what this one has: the numbers are wrong, and the work of the host and the kernels is the same.
    Broadcasts are left to the carrier.
    """

    def __init__(self, carrier: Transport, collectives: bool):
        super().__init__(carrier)
        self._collectives = collectives

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        """Let zeros arrive."""
        for _, tensor in arriving:
            tensor.zero_()
        return _Nothing()

    def all_reduce(self, tensor: Tensor, group: Any) -> Request:
        """Add up as the carrier does, or take this rank's part for the sum."""
        return _Nothing() if self._collectives else self.carrier.all_reduce(tensor, group)

    def all_gather(self, tensor: Tensor, group: Any) -> Tensor:
        """Gather as the carrier does, or take this rank's tensor for those of all."""
        if not self._collectives:
            return self.carrier.all_gather(tensor, group)
        return torch.stack([tensor] * group.size)
