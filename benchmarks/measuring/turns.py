"""Timing of several things in turns, on all ranks, so that all of them meet the same machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import TYPE_CHECKING, TypeVar

from distconv.planning.scaling import SHORTEST, Contender, timed, warm_up
from distconv.transport.interface import ObjectCommunicator

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

ROUNDS = 5, 200
"""The fewest and the most measurements of each side."""


def alternate(
    comm: MPI.Intracomm | ObjectCommunicator, sides: Sequence[Contender], seconds: float
) -> tuple[list[float], ...]:
    """Return for every side the seconds of a call, round by round; the same numbers on all ranks.

    Every round times all sides one after the other, every second round in reverse, so that a
    disturbance of the machine disturbs them alike. A time is that of the slowest rank. A side
    shorter than `SHORTEST` is repeated for that long, whatever the others take.

    Parameters
    ----------
    comm: the ranks that take part; all of them call it.
    seconds: about how long the measurement takes in all.
    """
    once = warm_up(comm, sides)
    repeated = [ceil(SHORTEST / elapsed) for elapsed in once]
    fewest, most = ROUNDS
    round_takes = sum(n * elapsed for n, elapsed in zip(repeated, once, strict=True))
    rounds = min(max(int(seconds / round_takes), fewest), most)
    times: tuple[list[float], ...] = tuple([] for _ in sides)
    for side, repeats, of_side in in_turns(list(zip(sides, repeated, times, strict=True)), rounds):
        of_side.append(timed(comm, side, repeats))
    return times


def in_turns(sides: Sequence[T], rounds: int) -> Iterator[T]:
    """Yield all sides in each round, in reverse in every second one."""
    for i in range(rounds):
        yield from sides if i % 2 == 0 else reversed(sides)
