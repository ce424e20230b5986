"""Checks that all ranks do a thing alike, by a small message beside the computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np

from distconv.geometry.topology import AXES
from distconv.grid.interface import Grid
from distconv.grid.order import ranks_in_words

_BITS = 24
"""Bits of a fingerprint, so that sums of squares over 16,000 ranks are exact in 64 bits."""


def fingerprint(state: object) -> int:
    """Return a number that is most probably another for another state; equal states have equal
    ones.

    Parameters
    ----------
    state: numbers, strings, and tuples and lists of them.
    """
    return crc32(repr(state).encode()) % 2**_BITS


class Agreement:
    """Questions to all ranks of a grid whether they have the same numbers, one at a time.

    All ranks ask the same questions in the same order, and go on until they take the answer, which
    is there when every rank has asked.
    """

    def __init__(self, grid: Grid):
        self._grid = grid
        # On the meta device there are no other ranks that could answer.
        self._size = 1 if grid.device.type == "meta" else grid.size
        self._comm = grid.communicator(AXES, "checks")
        self._asked: tuple[Any, Any, Any] | None = None

    def ask(self, *numbers: int) -> None:
        """Start to compare numbers of at most 24 bits with those of the other ranks."""
        if self._size == 1:
            return
        if self._asked is not None:
            # The program was interrupted before the answer, and so were the others.
            self._wait(self._asked[0])
        mine = np.array((*numbers, *(n * n for n in numbers)), dtype=np.int64)
        sums = np.empty_like(mine)
        self._asked = self._comm.Iallreduce(mine, sums), sums, mine

    def answer(self) -> list[bool]:
        """Return whether all ranks have the same, for each number that was last asked about."""
        if self._asked is None:
            return []
        (request, sums, _), self._asked = self._asked, None
        self._wait(request)
        # The mean of squares is the square of the mean where all are equal, and nowhere else.
        totals, squares = sums.reshape(2, -1).tolist()
        return [self._size * q == t * t for t, q in zip(totals, squares, strict=True)]

    def everyone(self, mine: Any) -> list[Any]:
        """Return the values that all ranks bring, in rank order; all of them call it."""
        return self._grid.all_gather_object(mine)

    def _wait(self, request: Any) -> None:
        with self._grid.waiting():
            request.Wait()


def differences(everyone: Sequence[dict[str, Any]]) -> list[str]:
    """Return each name whose value is not rank 0's on all ranks, with its values."""
    found = []
    for name, first in everyone[0].items():
        others = [rank for rank, theirs in enumerate(everyone) if theirs[name] != first]
        if others:
            value = everyone[others[0]][name]
            where = ranks_in_words(rank for rank in others if everyone[rank][name] == value)
            found.append(f"{name} is {value} on {where} and {first} on rank 0")
    return found
