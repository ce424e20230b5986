"""This rank's present waits for other ranks, where the watching thread can see them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from distconv.device.streams import has_passed, record_event


class Wait:
    """A context during which the host waits for other ranks.

    `peers()` returns the numbers of the awaited ranks; `peers` is None if all ranks are awaited.
    `seen` is the time, of `time.monotonic` in seconds, at which the watching thread first saw the
    wait; 0 before.
    """

    __slots__ = ("_before", "_waiting", "peers", "seen")

    def __init__(self, waiting: Waiting, peers: Callable[[], Iterable[int]] | None = None):
        self._waiting, self.peers, self.seen = waiting, peers, 0.0

    def __enter__(self) -> None:
        self._before, self._waiting.now = self._waiting.now, self

    def __exit__(self, *_: object) -> None:
        self._waiting.now = self._before


class StreamWait:
    """A wait for the ranks `peers` that was queued on the current stream of a GPU.

    `step` is the number of this rank's collective step, `operator` the running function or None,
    `seen` as for `Wait`. The wait is over when the GPU has reached `event`.
    """

    def __init__(self, device: torch.device, peers: Iterable[int], step: int, operator: Any):
        self.device, self.event = device, record_event(device)
        self.peers, self.step, self.operator, self.seen = peers, step, operator, 0.0


class Waiting:
    """The present waits of this rank, for the watching thread.

    Attributes
    ----------
    now: the innermost wait of the host, or None.
    of_streams: waits of a GPU's streams, in the order in which they were queued.
    checks: functions that raise `RuntimeError` if a carrier between accelerators has met an error.
    """

    def __init__(self) -> None:
        self.now: Wait | None = None
        self.of_streams: deque[StreamWait] = deque()
        self.checks: list[Callable[[], None]] = []

    def oldest_of_streams(self) -> StreamWait | None:
        """Return the earliest queued wait of a stream that is not over, or None.

        Only the watching thread may call it.
        """
        given = self.of_streams
        while given and has_passed(given[0].event, given[0].device):
            given.popleft()
        return given[0] if given else None
