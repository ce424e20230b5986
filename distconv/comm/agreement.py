"""Checks that all ranks do something alike, by a small message beside the computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

from distconv.geometry.topology import AXES
from distconv.grid.interface import Grid
from distconv.grid.whereabouts import ranks_in_words
from distconv.transport.interface import Communicator, Comparison


def fingerprint(state: object) -> int:
    """Return a number that is equal for equal states, which are made of numbers, strings, tuples
    and lists, and differs for others with high probability.
    """
    return crc32(repr(state).encode())


def for_checks(grid: Grid) -> Communicator:
    """Return the communicator of a grid for comparisons.

    Where an error has interrupted all ranks, those that had asked less catch up.
    """
    comm: Communicator = grid.communicator(AXES, "checks")
    missed, grid.journal.missed = grid.journal.missed, 0
    for _ in range(missed):
        with grid.waiting():
            comm.compare((0, 0)).wait()
    return comm


class Agreement:
    """Comparisons of numbers among all ranks of a grid, one at a time.

    All ranks ask the same questions in the same order, and continue until they take the answer,
    which is ready when every rank has asked.
    """

    def __init__(self, grid: Grid):
        self._grid = grid
        # On the meta device there are no other ranks that could answer.
        self._size = 1 if grid.device.type == "meta" else grid.size
        grid.communicator(AXES, "checks")  # made now, and not in the middle of an operator
        self._asked: Comparison | None = None

    def ask(self, one: int, other: int) -> None:
        """Start to compare two numbers with those of the other ranks."""
        if self._size == 1:
            return
        if self._asked is not None:
            # Nobody has taken the answer: the program was interrupted, and so were the others.
            self.answer()
        self._grid.journal.count_elsewhere()
        self._asked = for_checks(self._grid).compare((one, other))

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
