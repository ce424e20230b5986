"""A watched carrier: its waits are visible, and its steps are compared between ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from distconv.device.streams import is_capturing, record_event
from distconv.transport.interface import Message, Request, StreamTransport, Transport


class Wait:
    """A wait of the host for other ranks, as a context; `peers` returns those, None all."""

    # `seen` is the time in seconds at which the watching thread first saw the wait; 0 before.
    __slots__ = ("_before", "_waiting", "peers", "seen")

    def __init__(self, waiting: Waiting, peers: Callable[[], Iterable[int]] | None = None):
        self._waiting, self.peers = waiting, peers

    def __enter__(self) -> None:
        self.seen = 0.0
        self._before, self._waiting.now = self._waiting.now, self

    def __exit__(self, *_: object) -> None:
        self._waiting.now = self._before


class StreamWait:
    """A wait for `peers` that was queued on the current stream of a GPU, at a collective step of
    this rank, in an operator, or outside of any (None). `seen` is the time in seconds at which
    the watching thread first saw it; 0 before.
    """

    def __init__(self, device: torch.device, peers: Iterable[int], step: int, operator: Any):
        self._event = record_event(device)
        self.peers, self.step, self.operator, self.seen = peers, step, operator, 0.0

    @property
    def is_over(self) -> bool:
        """Return whether the stream has passed it."""
        over: bool = self._event.query()
        return over


class Waiting:
    """The waits of this rank under way, for a thread to watch.

    Attributes
    ----------
    now: the current wait of the host, or None.
    of_streams: the waits of a GPU's streams, in the order in which they were queued.
    checks: functions that raise `RuntimeError` where a carrier without host waits has met an error.
    """

    def __init__(self) -> None:
        self.now: Wait | None = None
        self.of_streams: deque[StreamWait] = deque()
        self.checks: list[Callable[[], None]] = []

    def oldest_of_streams(self) -> StreamWait | None:
        """Return the first wait of a stream that is not over; only one thread may call it."""
        given = self.of_streams
        while given and given[0].is_over:
            given.popleft()
        return given[0] if given else None


class WrappedTransport:
    """A carrier that passes everything on; see `Transport`. Subclasses override methods."""

    def __init__(self, carrier: Transport):
        self.name, self.ordered, self.next_tag = carrier.name, carrier.ordered, carrier.next_tag
        self.carry_by(carrier)

    def carry_by(self, carrier: Transport) -> None:
        """Pass everything to this carrier from now on."""
        # Every message allocates memory, without a call in between.
        self.carrier, self.empty = carrier, carrier.empty

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        return self.carrier.exchange(arriving, leaving, tag)

    def all_reduce(self, tensor: Tensor, group: Any) -> Request:
        return self.carrier.all_reduce(tensor, group)

    def all_gather(self, tensor: Tensor, group: Any) -> Tensor:
        return self.carrier.all_gather(tensor, group)

    def broadcast(self, tensor: Tensor, group: Any) -> None:
        self.carrier.broadcast(tensor, group)


class _WatchedRequest(Wait):
    """A wait for the carrier's `request`, which may begin later."""

    __slots__ = ("request",)

    def __init__(
        self, waiting: Waiting, peers: Callable[[], Iterable[int]], request: Request | None = None
    ):
        self._waiting, self.peers, self.request = waiting, peers, request

    def wait(self) -> None:
        assert self.request is not None
        with self:
            self.request.wait()


class _NotedRequest:
    """A request whose wait is on a stream, and is noted."""

    __slots__ = ("_note", "_request")

    def __init__(self, request: Request, note: Callable[[], None]):
        self._request, self._note = request, note

    def wait(self) -> None:
        """Let the current stream wait for the carrier's request."""
        self._request.wait()
        self._note()


class WatchedTransport(WrappedTransport):
    """A carrier with visible waits and steps that are compared between ranks; see `Transport`.
    `members` returns the ranks of a group as numbers in the grid.
    """

    def __init__(self, carrier: Transport, journal: Any, members: Callable[[Any], Iterable[int]]):
        super().__init__(carrier)
        self.next_tag, self._take = journal.next_tag, journal.take
        self._journal, self._waiting, self._members = journal, journal.waiting, members
        self._by_streams = carrier.ordered
        if self._by_streams:
            by_streams = cast(StreamTransport, carrier)
            self._device = by_streams.device
            self._waiting.checks.append(by_streams.check)

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        self._take("exchange", tag)
        request = self.carrier.exchange(arriving, leaving, tag)

        def peers() -> Iterable[int]:
            return {rank for rank, _ in (*arriving, *leaving)}

        if self._by_streams:
            return _NotedRequest(request, partial(self._note_stream_wait, peers()))
        return _WatchedRequest(self._waiting, peers, request)

    def all_reduce(self, tensor: Tensor, group: Any) -> Request:
        self._take("all_reduce")
        watched = _WatchedRequest(self._waiting, partial(self._members, group))
        with watched:  # where the ranks of a group have to connect first
            watched.request = request = self.carrier.all_reduce(tensor, group)
        if self._by_streams:
            return _NotedRequest(request, partial(self._note_stream_wait, self._members(group)))
        return watched

    def all_gather(self, tensor: Tensor, group: Any) -> Tensor:
        with self._at_once("all_gather", group):
            return self.carrier.all_gather(tensor, group)

    def broadcast(self, tensor: Tensor, group: Any) -> None:
        with self._at_once("broadcast", group):
            self.carrier.broadcast(tensor, group)

    @contextmanager
    def _at_once(self, kind: str, group: Any) -> Iterator[None]:
        """Take a step that the host, or the current stream, waits for within it."""
        self._take(kind)
        with Wait(self._waiting, partial(self._members, group)):
            yield
        if self._by_streams:
            self._note_stream_wait(self._members(group))

    def _note_stream_wait(self, peers: Iterable[int]) -> None:
        """Note that a wait was queued on the current stream.

        Waits in a captured graph happen at replay, and are not seen.
        """
        if not is_capturing(self._device):
            journal = self._journal
            wait = StreamWait(self._device, peers, journal.number, journal.operator)
            self._waiting.of_streams.append(wait)
