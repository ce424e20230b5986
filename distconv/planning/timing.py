"""Timing functions on all ranks of a job, or on some of them while the others sleep."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from distconv.transport.interface import ObjectCommunicator
from distconv.transport.torch_groups import TorchCommunicator

if TYPE_CHECKING:
    from mpi4py import MPI

SHORTEST = 0.01
"""The least seconds of one measurement; shorter calls are repeated."""


@dataclass(frozen=True)
class Contender:
    """A function to be timed against others, with the ranks and threads that run it."""

    run: Callable[[], object]
    threads: int = 1
    ranks: int | None = None
    """The number of ranks that run it, from rank 0 on, while the others sleep; by default all."""


class Spread(NamedTuple):
    """The median of some measurements, and their quartiles."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the quartiles of `values`; of one value, that value three times."""
    if len(values) == 1:
        return Spread(*values, *values, *values)
    low, median, high = quantiles(values, method="inclusive")
    return Spread(median, low, high)


def warm_up(comm: MPI.Intracomm | ObjectCommunicator, sides: Sequence[Contender]) -> list[float]:
    """Return the seconds of one call of each function, after two calls. All ranks call it."""
    for side in sides:
        timed(comm, side, 2)
    return [timed(comm, side, 1) for side in sides]


def sleep_until_all_are_here(comm: MPI.Intracomm | ObjectCommunicator) -> None:
    """Wait until all ranks call it, asleep; MPI's own barrier would keep a core busy."""
    if isinstance(comm, TorchCommunicator):
        comm.allgather(None)  # gloo's waits sleep
        return
    of_mpi: Any = comm
    request = of_mpi.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)


def timed(comm: MPI.Intracomm | ObjectCommunicator, side: Contender, repeats: int) -> float:
    """Return the seconds per call on the slowest rank, over `repeats` calls. All ranks call it."""
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
