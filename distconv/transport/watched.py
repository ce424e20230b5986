"""Any carrier, watched: its waits are visible, and its steps are compared between ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from distconv.transport.interface import Message, Request, StreamTransport, Transport


class StreamWait:
    """One wait that a stream has been given.

    Attributes
    ----------
    peers: the ranks that are waited for, in the numbers of the grid.
    step: how many collective steps this rank had taken.
    operator: the function within which it waits; None outside of any.
    """

    def __init__(self, event: Any, peers: Iterable[int], step: int, operator: Any):
        self._event, self.peers, self.step, self.operator = event, peers, step, operator

    @property
    def is_over(self) -> bool:
        """Return whether the stream has come past it."""
        over: bool = self._event.query()
        return over


class StreamWaits:
    """The waits of this rank's streams, in the order in which they were given.

    A thread that only looks takes out what is over, and no other does.
    """

    def __init__(self) -> None:
        self._given: deque[StreamWait] = deque()

    def add(self, peers: Iterable[int], step: int, operator: Any) -> None:
        """Note that the current stream has just been given a wait.

        What a graph captures waits when it is replayed, unseen.
        """
        if not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.current_stream().record_event()
            self._given.append(StreamWait(event, peers, step, operator))

    def oldest(self) -> StreamWait | None:
        """Return the first one that is not over."""
        given = self._given
        while given and given[0].is_over:
            given.popleft()
        return given[0] if given else None


class WrappedTransport:
    """Hand everything to a carrier; see `Transport`. Subclasses override what they change."""

    def __init__(self, carrier: Transport):
        self.carrier, self.name, self.ordered = carrier, carrier.name, carrier.ordered
        # What every message asks for, without a call in between.
        self.next_tag, self.empty = carrier.next_tag, carrier.empty

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


class Steps(Protocol):
    """The collective steps of the ranks of a grid, which all of them take in one order."""

    def next_tag(self) -> int:
        """Return the number of the next exchange, the same on all ranks."""

    def take(self, kind: str, tag: int = 0) -> None:
        """Begin the next step, or raise where the ranks differ in it."""

    @property
    def number(self) -> int:
        """Return how many steps this rank has taken."""

    @property
    def operator(self) -> Any:
        """Return the function that this rank is in; None outside of any."""


class Waiting:
    """The waits of this rank under way, for a thread to look at.

    Attributes
    ----------
    now: the wait of the host that is under way, or None. A wait is told from the next by its
        identity.
    streams: those of a GPU's streams.
    checks: raise `RuntimeError` where a carrier, for which no host waits, has met with an error.
    """

    def __init__(self) -> None:
        self.now: Wait | None = None
        self.streams = StreamWaits()
        self.checks: list[Callable[[], None]] = []


class Wait:
    """One wait for other ranks, while the program is within it.

    Parameters
    ----------
    peers: returns the ranks that are waited for, in the numbers of the grid; None for all.
    """

    __slots__ = ("__weakref__", "_before", "_waiting", "peers")

    def __init__(self, waiting: Waiting, peers: Callable[[], Iterable[int]] | None = None):
        self._waiting, self.peers = waiting, peers

    def __enter__(self) -> None:
        self._before, self._waiting.now = self._waiting.now, self

    def __exit__(self, *_: object) -> None:
        self._waiting.now = self._before


class _WatchedRequest(Wait):
    """A wait for `request`, the carrier's, that may begin later."""

    __slots__ = ("request",)

    def __init__(
        self, waiting: Waiting, peers: Callable[[], Iterable[int]], request: Request | None = None
    ):
        self._waiting, self.peers, self.request = waiting, peers, request

    def wait(self) -> None:
        """Wait for the carrier's request."""
        # As in `with self`, which takes longer.
        waiting = self._waiting
        assert self.request is not None
        before, waiting.now = waiting.now, self
        try:
            self.request.wait()
        finally:
            waiting.now = before


class _StreamRequest:
    """A request for which a stream waits; the ranks that are waited for are in `peers`."""

    __slots__ = ("_peers", "_request", "_steps", "_streams")

    def __init__(
        self, request: Request, streams: StreamWaits, steps: Steps, peers: Iterable[int]
    ) -> None:
        self._request, self._streams, self._steps, self._peers = request, streams, steps, peers

    def wait(self) -> None:
        """Let the current stream wait for the carrier's request."""
        self._request.wait()
        self._streams.add(self._peers, self._steps.number, self._steps.operator)


class WatchedTransport(WrappedTransport):
    """A carrier whose waits can be seen, and whose steps are compared; see `Transport`.

    Parameters
    ----------
    carrier: the transport that carries the messages.
    steps: the collective steps, by which it is compared what the ranks are about to do.
    waiting: shows the wait under way to the watching thread.
    members: returns the ranks of a group in the numbers of the grid.
    """

    def __init__(
        self,
        carrier: Transport,
        steps: Steps,
        waiting: Waiting,
        members: Callable[[Any], Iterable[int]],
    ):
        super().__init__(carrier)
        self.next_tag = steps.next_tag
        self._steps, self._waiting, self._members = steps, waiting, members
        self._streams = waiting.streams if carrier.ordered else None
        if carrier.ordered:
            waiting.checks.append(cast(StreamTransport, carrier).check)

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        """Start the messages of one exchange."""
        self._steps.take("exchange", tag)
        request = self.carrier.exchange(arriving, leaving, tag)
        if self._streams is not None:
            ranks = {rank for rank, _ in (*arriving, *leaving)}
            return _StreamRequest(request, self._streams, self._steps, ranks)

        def peers() -> Iterable[int]:
            return {rank for rank, _ in (*arriving, *leaving)}

        return _WatchedRequest(self._waiting, peers, request)

    def all_reduce(self, tensor: Tensor, group: Any) -> Request:
        """Start adding up a tensor in place over the ranks of `group`."""
        self._steps.take("all_reduce")

        def members() -> Iterable[int]:
            return self._members(group)

        watched = _WatchedRequest(self._waiting, members)
        with watched:  # where the ranks of a group have to connect first
            watched.request = request = self.carrier.all_reduce(tensor, group)
        if self._streams is not None:
            return _StreamRequest(request, self._streams, self._steps, tuple(members()))
        return watched

    def all_gather(self, tensor: Tensor, group: Any) -> Tensor:
        """Return the tensors of all ranks of `group`, stacked in rank order."""
        self._steps.take("all_gather")
        with Wait(self._waiting, lambda: self._members(group)):
            gathered = self.carrier.all_gather(tensor, group)
        self._note_stream_wait(group)
        return gathered

    def broadcast(self, tensor: Tensor, group: Any) -> None:
        """Overwrite a tensor by the one of the first rank of `group`."""
        self._steps.take("broadcast")
        with Wait(self._waiting, lambda: self._members(group)):
            self.carrier.broadcast(tensor, group)
        self._note_stream_wait(group)

    def _note_stream_wait(self, group: Any) -> None:
        if self._streams is not None:
            steps = self._steps
            self._streams.add(tuple(self._members(group)), steps.number, steps.operator)
