"""Tags of messages: the number of the exchange that a message belongs to."""

from __future__ import annotations

_MOST = 32767
"""The number of tags before they repeat; every MPI has as many."""


class Tags:
    """The tags 1, 2, ... of exchanges, which all ranks start in one order."""

    def __init__(self) -> None:
        self.last = 0

    def next(self) -> int:
        """Return the tag of the next exchange."""
        self.last = self.last % _MOST + 1
        return self.last
