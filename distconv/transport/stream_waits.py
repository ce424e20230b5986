"""Waits for other ranks that streams of a GPU have been given, while the host goes on.

Nobody sees such a wait begin or end. An event behind it tells when the stream has come past it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch


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
