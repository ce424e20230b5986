"""Any carrier, watched: its waits are visible, and its steps are compared between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from distconv.transport.interface import Message, Request, Transport


class Steps(Protocol):
    """The collective steps of the ranks of a grid, which all of them take in one order."""

    def next_tag(self) -> int:
        """Return the number of the next exchange, the same on all ranks."""

    def take(self, kind: str, tag: int = 0) -> None:
        """Begin the next step, or raise where the ranks differ in it."""


class Waiting:
    """The wait of this rank under way, for a thread to look at.

    Attributes
    ----------
    now: the wait that is under way, or None. A wait is told from the next by its identity.
    """

    def __init__(self) -> None:
        self.now: Wait | None = None


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
    __slots__ = ("_request",)

    def __init__(self, request: Request, waiting: Waiting, peers: Callable[[], Iterable[int]]):
        self._request, self._waiting, self.peers = request, waiting, peers

    def wait(self) -> None:
        """Wait for the carrier's request."""
        # As in `with self`, which takes longer.
        waiting = self._waiting
        before, waiting.now = waiting.now, self
        try:
            self._request.wait()
        finally:
            waiting.now = before


class WatchedTransport:
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
        self.carrier, self.name, self.ordered = carrier, carrier.name, carrier.ordered
        self._steps, self._waiting, self._members = steps, waiting, members

    def next_tag(self) -> int:
        """Return the tag of the next exchange."""
        return self._steps.next_tag()

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return memory for a message."""
        return self.carrier.empty(shape, like)

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        """Start the messages of one exchange."""
        self._steps.take("exchange", tag)
        request = self.carrier.exchange(arriving, leaving, tag)

        def peers() -> Iterable[int]:
            return {rank for rank, _ in (*arriving, *leaving)}

        return _WatchedRequest(request, self._waiting, peers)

    def all_reduce(self, tensor: Tensor, group: Any) -> Request:
        """Start adding up a tensor in place over the ranks of `group`."""
        self._steps.take("all_reduce")

        def members() -> Iterable[int]:
            return self._members(group)

        with Wait(self._waiting, members):  # where the ranks of a group have to connect first
            request = self.carrier.all_reduce(tensor, group)
        return _WatchedRequest(request, self._waiting, members)

    def all_gather(self, tensor: Tensor, group: Any) -> Tensor:
        """Return the tensors of all ranks of `group`, stacked in rank order."""
        self._steps.take("all_gather")
        with Wait(self._waiting, lambda: self._members(group)):
            return self.carrier.all_gather(tensor, group)

    def broadcast(self, tensor: Tensor, group: Any) -> None:
        """Overwrite a tensor by the one of the first rank of `group`."""
        self._steps.take("broadcast")
        with Wait(self._waiting, lambda: self._members(group)):
            self.carrier.broadcast(tensor, group)
