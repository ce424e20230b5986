"""Messages that MPI starts after an event of a GPU, in the order of the program."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from distconv.transport.interface import Request


class Event(Protocol):
    """A point in what a GPU has been given to do."""

    def synchronize(self) -> None:
        """Let the host wait until the GPU has come that far."""


class LaunchQueue:
    """Messages and reductions that a process has not given to MPI yet.

    Whoever waits for one of them starts all. So ranks may wait for them in different orders, also
    for those of several grids: a message that another rank waits for has been started here, and
    collectives are started in the same order on all ranks.
    """

    def __init__(self) -> None:
        self._waiting: deque[QueuedRequest] = deque()

    def add(self, ready: Event, start: Callable[[], Request]) -> QueuedRequest:
        """Let `start` follow `ready`; MPI must not touch the memory of a GPU before."""
        queued = QueuedRequest(self, ready, start)
        self._waiting.append(queued)
        return queued

    def start_all(self) -> None:
        """Give all that is queued to MPI, in the order in which it came."""
        while self._waiting:
            self._waiting.popleft().start()


class QueuedRequest:
    """A message or a reduction in the queue."""

    def __init__(self, queue: LaunchQueue, ready: Event, start: Callable[[], Request]):
        self._queue, self._ready, self._start = queue, ready, start
        self._request: Request | None = None

    def start(self) -> None:
        """Wait for the GPU, and start."""
        self._ready.synchronize()
        self._request = self._start()

    def wait(self) -> None:
        """Return when it is complete; this starts all that is queued."""
        self._queue.start_all()
        assert self._request is not None
        self._request.wait()
