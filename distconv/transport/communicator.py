"""Some ranks of the job, and the small messages by which their hosts agree: MPI's, or torch's."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from operator import eq, neg
from typing import Any, Protocol

import numpy as np


class Comparison:
    """Numbers that are being compared among ranks.

    Parameters
    ----------
    wait: returns when `most` is there.
    most: the numbers of this rank, followed by the same with the other sign; then, in the same
        memory, the largest of each over the ranks.
    """

    def __init__(self, wait: Callable[[], object], most: array[int]):
        self._wait, self._most = wait, most

    def wait(self) -> list[bool]:
        """Return, when every rank has brought its numbers, which of them are the same on all."""
        self._wait()
        most = self._most
        half = len(most) // 2
        return list(map(eq, most[:half], map(neg, most[half:])))


def with_opposites(numbers: Sequence[int]) -> array[int]:
    """Return numbers, and the same with the other sign: their maxima over ranks tell extremes."""
    return array("q", (*numbers, *map(neg, numbers)))


class ObjectCommunicator(Protocol):
    """The part of mpi4py's communicators that `ProcessGrid.comm` has in any case: small objects.

    All of them call each method together, and in one order.
    """

    @property
    def rank(self) -> int:
        """Return this rank's number among them."""

    @property
    def size(self) -> int:
        """Return how many they are."""

    def allgather(self, value: Any, /) -> list[Any]:
        """Return what every rank passes, in rank order."""

    def bcast(self, value: Any = None, /) -> Any:
        """Return what the first rank passes."""


class Communicator(ObjectCommunicator, Protocol):
    """Ranks of the job that exchange small messages on the host, for one purpose."""

    ranks: tuple[int, ...]
    """All of them by their numbers in the job, in their order."""
    purpose: str

    def all_gather_numbers(self, numbers: Sequence[int]) -> np.ndarray:
        """Return the numbers of every rank, of shape (size, len(numbers)), in 64 bits."""

    def compare(self, numbers: Sequence[int]) -> Comparison:
        """Start to compare numbers of fewer than 64 bits with those of the other ranks."""

    def subgroup(self, ranks: tuple[int, ...], purpose: str) -> Communicator:
        """Return a communicator of some of the ranks, in numbers of the job; those call it."""

    def for_program(self) -> Any:
        """Return what `ProcessGrid.comm` gives to programs."""
