"""The waits of this rank for other ranks, which a thread watches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from distconv.device.streams import record_event


class Wait:
    """A wait of the host for other ranks, as a context; `peers` returns those, None all.

    `seen` is the time in seconds at which the watching thread first saw it; 0 before.
    """

    __slots__ = ("_before", "_waiting", "peers", "seen")

    def __init__(self, waiting: Waiting, peers: Callable[[], Iterable[int]] | None = None):
        self._waiting, self.peers, self.seen = waiting, peers, 0.0

    def __enter__(self) -> None:
        self._before, self._waiting.now = self._waiting.now, self

    def __exit__(self, *_: object) -> None:
        self._waiting.now = self._before


class StreamWait:
    """A wait for `peers` that was queued on the current stream of a GPU, at a collective step of
    this rank, in an operator, or outside of any (None). `seen` is as for `Wait`.
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
    """The waits of this rank under way.

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
