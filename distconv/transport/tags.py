"""The tags of messages: numbers that tell one exchange from another in flight."""

from __future__ import annotations

_MOST = 32767
"""How many tags there are before they begin again; every MPI has as many."""


class Tags:
    """The numbers of exchanges, which all ranks start in one order.

    Attributes
    ----------
    last: the tag of the latest exchange; 0 before the first.
    """

    def __init__(self) -> None:
        self.last = 0

    def next(self) -> int:
        """Return the tag of the next exchange."""
        self.last = self.last % _MOST + 1
        return self.last
