"""A carrier for dry runs that tells when messages start, and when somebody waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from distconv.planning.dry_run import CountingTransport, Done, DryGroup
from distconv.planning.recording import Place, Start
from distconv.transport.interface import Message


class CountedMessages(CountingTransport):
    """A carrier that tells the recorder what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.started: Callable[[Start], None] = lambda start: None
        self.waited: Callable[[int], None] = lambda number: None
        self.made: Callable[[Tensor], None] = lambda message: None
        self._number = 0

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        message = super().empty(shape, like)
        self.made(message)
        return message

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        into, out = (tuple((rank, t.nbytes) for rank, t in x) for x in (arriving, leaving))
        return self._start(None, into, out, (arriving, leaving))

    def all_reduce(self, tensor: Tensor, group: DryGroup) -> Request:
        return self._collective("all_reduce", tensor, group)

    def all_gather(self, tensor: Tensor, group: DryGroup) -> Tensor:
        gathered = tensor.new_empty((group.size, *tensor.shape))
        self._collective("all_gather", tensor, group).wait()
        return gathered

    def _collective(self, kind: str, tensor: Tensor, group: DryGroup) -> Request:
        others = (peer for i, peer in enumerate(group.ranks) if i != group.rank)
        contributions = tuple((peer, tensor.nbytes) for peer in others)
        return self._start(kind, contributions, (), tensor)

    def _start(
        self,
        kind: str | None,
        arriving: tuple[tuple[int, int], ...],
        leaving: tuple[tuple[int, int], ...],
        memory: Any,
    ) -> Request:
        self._number += 1
        nothing = not arriving and not leaving
        if not nothing:
            self.started(Start(self._number, kind, arriving, leaving, _NOWHERE))
        return Request(None if nothing else self._number, self, memory)


_NOWHERE = Place("", "forward")


class Request(Done):
    """Messages under way, which hold their memory until somebody waits for them."""

    def __init__(self, number: int | None, transport: CountedMessages, memory: Any):
        self._number, self._transport, self._memory = number, transport, memory

    def wait(self) -> None:
        """Tell the recorder that the rank waits here."""
        number, self._number, self._memory = self._number, None, None
        if number is not None:
            self._transport.waited(number)
