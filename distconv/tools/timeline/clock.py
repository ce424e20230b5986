"""One clock for all ranks: how far each rank's is ahead of that of rank 0.

Messages go to and fro between rank 0 and each other rank (Mills, "Internet Time Synchronization:
the Network Time Protocol", 1991). The way back is taken to be as long as the way there, so an
offset is wrong by half of the shortest round trip at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from distconv.grid.process_grid import ProcessGrid

_ROUNDS = 10
"""Round trips with each rank, of which the shortest counts."""


class Offset(NamedTuple):
    """How far a rank's clock is ahead of that of rank 0, in nanoseconds.

    Attributes
    ----------
    error: by how much `ahead` may be wrong.
    at: when it was measured, by the rank's own clock.
    """

    ahead: float
    error: float
    at: int


def measure_offsets(grid: ProcessGrid, now: Callable[[], int] = time.time_ns) -> list[Offset]:
    """Return the offset of every rank, in rank order; all ranks of the grid call it together.

    Parameters
    ----------
    grid: on CPUs.
    now: returns the time of this rank's clock in nanoseconds.
    """
    mine = Offset(0.0, 0.0, now())
    for other in range(1, grid.size):
        trips = [_round_trip(grid, other, now) for _ in range(_ROUNDS)]
        if grid.rank == other:
            ahead, length = min(trips, key=lambda trip: trip[1])
            mine = Offset(ahead, length / 2, now())
    return [Offset(*theirs) for theirs in grid.all_gather_object(tuple(mine))]


def on_clock_of_rank_0(
    events: list[dict[str, Any]], before: Offset, after: Offset
) -> list[dict[str, Any]]:
    """Shift the times of events by the offset, which changes evenly between two measurements.

    Times, in microseconds under "ts", are overwritten.
    """
    drift = (after.ahead - before.ahead) / max(1, after.at - before.at)
    for event in events:
        ahead = before.ahead + drift * (event["ts"] * 1000 - before.at)
        event["ts"] -= ahead / 1000
    return events


def _round_trip(grid: ProcessGrid, other: int, now: Callable[[], int]) -> tuple[float, float]:
    """Return by how much the clock of `other` is ahead, and how long the messages took; there.

    All ranks take part, so that their exchanges keep one number everywhere.
    """
    sent, there = _message(now()), torch.zeros(1, dtype=torch.int64)
    _send(grid, 0, other, sent, torch.zeros(1, dtype=torch.int64))
    arrived = now()
    _send(grid, other, 0, torch.zeros(1, dtype=torch.int64), there)
    back = now()
    times = torch.zeros(2, dtype=torch.int64)
    _send(grid, 0, other, torch.cat([sent, _message(back)]), times)
    begin, end = times.tolist()
    return arrived - (begin + end) / 2, end - begin


def _send(
    grid: ProcessGrid, source: int, target: int, message: torch.Tensor, into: torch.Tensor
) -> None:
    arriving = [(source, into)] if grid.rank == target else []
    leaving = [(target, message)] if grid.rank == source else []
    transport = grid.transport
    transport.exchange(arriving, leaving, transport.next_tag()).wait()


def _message(nanoseconds: int) -> torch.Tensor:
    return torch.tensor([nanoseconds], dtype=torch.int64)
