"""A carrier that shows its waits to the watching thread, and enters its steps in the journal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from torch import Tensor

from distconv.device.streams import is_capturing
from distconv.grid.calls import CURRENT
from distconv.grid.journal import Journal
from distconv.grid.waits import StreamWait, Wait
from distconv.transport.interface import Message, Request, StreamTransport, Transport

Peers = Callable[[], Iterable[int]]
"""A function that returns the ranks that a wait is for."""


class WrappedTransport:
    """A transport around another one, `carrier`, to which subclasses pass the messages on."""

    def __init__(self, carrier: Transport):
        self.name, self.ordered, self.next_tag = carrier.name, carrier.ordered, carrier.next_tag
        self.carry_by(carrier)

    def carry_by(self, carrier: Transport) -> None:
        """Pass all later messages to `carrier`."""
        # Every message allocates memory, without a call in between.
        self.carrier, self.empty = carrier, carrier.empty


class _WatchedRequest:
    """A request whose `wait` runs within the context `wait()`, which the watching thread sees."""

    __slots__ = ("_request", "_wait")

    def __init__(self, request: Request, wait: Callable[[], Any]):
        self._request, self._wait = request, wait

    def wait(self) -> None:
        with self._wait():
            self._request.wait()


class WatchedTransport(WrappedTransport):
    """A carrier that shows its waits to the watching thread, and enters its steps in the journal.

    `members(group)` returns the ranks of the communicator `group`, as numbers in the grid.
    """

    def __init__(
        self, carrier: Transport, journal: Journal, members: Callable[[Any], Iterable[int]]
    ):
        super().__init__(carrier)
        self._journal, self._members = journal, members
        self.next_tag, self._waiting = journal.next_tag, journal.waiting
        if carrier.ordered:
            by_streams = cast(StreamTransport, carrier)
            self._waiting.checks.append(by_streams.check)
            self._visible: Callable[[Peers], Any] = partial(self._on_stream, by_streams.device)
        else:
            self._visible = partial(Wait, self._waiting)

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        self._journal.take("exchange", tag)
        request = self.carrier.exchange(arriving, leaving, tag)

        def peers() -> Iterable[int]:
            return {rank for rank, _ in (*arriving, *leaving)}

        return _WatchedRequest(request, partial(self._visible, peers))

    def all_reduce(self, tensor: Tensor, group: Any) -> Request:
        self._journal.take("all_reduce")
        peers = partial(self._members, group)
        with Wait(self._waiting, peers):  # where the ranks of a group have to connect first
            request = self.carrier.all_reduce(tensor, group)
        return _WatchedRequest(request, partial(self._visible, peers))

    def all_gather(self, tensor: Tensor, group: Any) -> Tensor:
        self._journal.take("all_gather")
        with self._visible(partial(self._members, group)):
            return self.carrier.all_gather(tensor, group)

    def broadcast(self, tensor: Tensor, group: Any) -> None:
        self._journal.take("broadcast")
        with self._visible(partial(self._members, group)):
            self.carrier.broadcast(tensor, group)

    @contextmanager
    def _on_stream(self, device: Any, peers: Peers) -> Iterator[None]:
        """Let the watching thread see that the host waits, within the context, for `peers()`.

        The host may wait while ranks connect. After the context the thread sees a wait of the
        current stream, unless the stream is being captured: that wait happens at each replay.
        """
        with Wait(self._waiting, peers):
            yield
        if not is_capturing(device):
            wait = StreamWait(device, peers(), self._journal.number, CURRENT.call[0])
            self._waiting.of_streams.append(wait)
