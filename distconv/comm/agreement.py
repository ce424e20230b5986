"""Checks that all ranks do something alike, by a small message beside the computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

from distconv.geometry.topology import AXES
from distconv.grid.interface import Grid
from distconv.grid.whereabouts import ranks_in_words
from distconv.transport.interface import Comparison


def fingerprint(state: object) -> int:
    """Return a number that differs for different states with high probability, and is equal for
    equal ones.

    Parameters
    ----------
    state: numbers, strings, and tuples and lists of them.
    """
    return crc32(repr(state).encode())


class Agreement:
    """Comparisons of numbers among all ranks of a grid, one at a time.

    All ranks ask the same questions in the same order, and continue until they take the answer,
    which is ready when every rank has asked.
    """

    def __init__(self, grid: Grid):
        self._grid = grid
        # On the meta device there are no other ranks that could answer.
        self._size = 1 if grid.device.type == "meta" else grid.size
        self._comm = grid.communicator(AXES, "checks")
        self._asked: Comparison | None = None

    def ask(self, *numbers: int) -> None:
        """Start to compare numbers with those of the other ranks."""
        if self._size == 1:
            return
        if self._asked is not None:
            # Nobody has taken the answer: the program was interrupted, and so were the others.
            self.answer()
        self._asked = self._comm.compare(numbers)

    def answer(self) -> list[bool]:
        """Return for each number that was last asked about whether all ranks have the same."""
        if self._asked is None:
            return []
        comparison, self._asked = self._asked, None
        with self._grid.waiting():
            return comparison.wait()


def differences(everyone: Sequence[dict[str, Any]]) -> list[str]:
    """Return each name whose value differs from rank 0's on some rank, with its values."""
    found = []
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        values = [theirs.get(name, "missing") for theirs in everyone]
        others = [value for value in values if value != values[0]]
        if others:
            where = ranks_in_words(r for r, value in enumerate(values) if value == others[0])
            found.append(f"{name} is {others[0]} on {where} and {values[0]} on rank 0")
    return found
