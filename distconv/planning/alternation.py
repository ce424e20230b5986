"""Timing of several things in turns, on all ranks, so that all of them meet the same machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import quantiles
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from distconv.transport.interface import ObjectCommunicator
from distconv.transport.torch_groups import TorchCommunicator

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

SHORTEST = 0.01
"""Seconds that one measurement takes at least; shorter calls are repeated."""
ROUNDS = 5, 200
"""The fewest and the most measurements of each side."""


@dataclass(frozen=True)
class Contender:
    """One of several functions that are compared, with the ranks and threads that run it."""

    run: Callable[[], object]
    threads: int = 1
    ranks: int | None = None
    """How many ranks run it together, from rank 0 on, while the others sleep; by default all."""


class Spread(NamedTuple):
    """The median of some numbers, and their quartiles."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the quartiles of some numbers; of one, that number three times."""
    if len(values) == 1:
        return Spread(*values, *values, *values)
    low, median, high = quantiles(values, method="inclusive")
    return Spread(median, low, high)


def alternate(
    comm: MPI.Intracomm | ObjectCommunicator, sides: Sequence[Contender], seconds: float
) -> tuple[list[float], ...]:
    """Return for every side the seconds of a call, round by round; the same numbers on all ranks.

    Every round times all sides one after the other, every second round in reverse, so that a
    disturbance of the machine disturbs them alike. A time is that of the slowest rank.

    Parameters
    ----------
    comm: the ranks that take part; all of them call it.
    seconds: about how long the measurement takes in all.
    """
    once = warm_up(comm, sides)
    repeats = ceil(SHORTEST / min(once))
    fewest, most = ROUNDS
    rounds = min(max(int(seconds / (repeats * sum(once))), fewest), most)
    times: tuple[list[float], ...] = tuple([] for _ in sides)
    for side, of_side in in_turns(list(zip(sides, times, strict=True)), rounds):
        of_side.append(timed(comm, side, repeats))
    return times


def warm_up(comm: MPI.Intracomm | ObjectCommunicator, sides: Sequence[Contender]) -> list[float]:
    """Return the seconds of a call of each side, after two that do not count; all ranks call it."""
    for side in sides:
        timed(comm, side, 2)
    return [timed(comm, side, 1) for side in sides]


def in_turns(sides: Sequence[T], rounds: int) -> Iterator[T]:
    """Yield all sides in each round, in reverse in every second one."""
    for i in range(rounds):
        yield from sides if i % 2 == 0 else reversed(sides)


def sleep_until_all_are_here(comm: MPI.Intracomm | ObjectCommunicator) -> None:
    """Wait for all ranks, leaving the cores to those that compute; MPI's own barrier polls."""
    if isinstance(comm, TorchCommunicator):
        comm.allgather(None)  # gloo's waits sleep
        return
    of_mpi: Any = comm
    request = of_mpi.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)


def timed(comm: MPI.Intracomm | ObjectCommunicator, side: Contender, repeats: int) -> float:
    """Return the seconds of one of several calls, on the slowest rank; all ranks call it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(side.threads)
    sleep_until_all_are_here(comm)
    # All have woken up when they leave this one, and start together.
    comm.allgather(None)
    start = time.perf_counter()
    if side.ranks is None or comm.rank < side.ranks:
        for _ in range(repeats):
            side.run()
    elapsed = time.perf_counter() - start
    torch.set_num_threads(threads)
    sleep_until_all_are_here(comm)
    return max(comm.allgather(elapsed)) / repeats
