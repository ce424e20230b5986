"""`timeline`: all ranks' activities, recorded on one clock and written to one file.

The clocks of ranks are compared by messages between rank 0 and each other rank, back and forth
(Mills, "Internet Time Synchronization: the Network Time Protocol", 1991). Both ways are assumed to
take equally long, so an offset is wrong by half of the shortest round trip at most.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch.profiler import profile

from distconv.comm.ledger import trace_movements
from distconv.data.durable import write_atomically
from distconv.device.kinds import profiler_activities
from distconv.grid.communicators import carried_by
from distconv.grid.process_grid import ProcessGrid
from distconv.tools.timeline.messages import (
    Event,
    Kinds,
    PassedMessages,
    RecordedTransport,
    events_of,
    named_rows,
)
from distconv.torch_private import is_profiling, profiler_refused


@contextmanager
def timeline(path: str | Path, grid: ProcessGrid | None = None) -> Iterator[None]:
    """Record the activities of all ranks in a `with` block, and write them to a file.

    All ranks enter and leave it together; torch.profiler records. At the end rank 0 writes the
    file, whole or not at all. After an error within the block nothing is written. Open the file in
    Perfetto (https://ui.perfetto.dev) or chrome://tracing, or print the sums of its times by
    `python -m distconv timeline FILE`.

    Each rank has the rows `compute`, torch's outermost operators, `wait`, and on a GPU `device`.
    Halos, redistributions, reductions and messages are shown from their start to the end of the
    wait for them. Times of all ranks are on the clock of rank 0, from round trips of messages at
    the beginning and at the end.

    Raises OSError on every rank, if rank 0 cannot write the file. Raises RuntimeError on every
    rank, if torch's profiler is recording on one of them already; and within the block, if the
    program starts it.

    Parameters
    ----------
    path: the path of the file; a file ending with .gz is compressed.
    grid: the ranks that take part; all of the job when not given.
    """
    path = Path(path)
    # Of the same ranks, with messages between hosts.
    grid = ProcessGrid(None if grid is None else grid.ranks, sample=-1, device="cpu")
    missing = None if grid.rank or path.absolute().parent.is_dir() else str(path.absolute().parent)
    everyone = grid.all_gather_object((missing, is_profiling()))
    if any(profiled for _, profiled in everyone):
        raise RuntimeError(f"timeline: torch's profiler is recording already. {_ONE_AT_A_TIME}")
    missing = everyone[0][0]
    if missing:
        raise FileNotFoundError(f"timeline: there is no folder {missing}; make it before")
    before = measure_offsets(grid)[grid.rank]
    kinds, passed = Kinds(), list[PassedMessages]()
    with (
        profile(activities=profiler_activities()) as recorded,
        profiler_refused(_refuse_profiler),
        trace_movements(kinds),
        carried_by(lambda transport: RecordedTransport(transport.carrier, kinds.of, passed)),
    ):
        yield
    after = measure_offsets(grid)[grid.rank]
    events = _exported(recorded, passed, grid.rank)
    _write(path, grid, on_clock_of_rank_0(events, before, after), after)


_ONE_AT_A_TIME = (
    "It makes one recording at a time: let one of the two end before the other begins. "
    "python -m distconv timeline FILE adds up the operators and messages of a timeline"
)


def _refuse_profiler(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(f"torch.profiler within dc.timeline(). {_ONE_AT_A_TIME}")


def _exported(recorded: Any, passed: list[PassedMessages], rank: int) -> list[Event]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(file))
        return events_of(json.loads(file.read_text()), passed, rank)


def _write(path: Path, grid: ProcessGrid, events: list[Event], offset: Offset) -> None:
    """Gather all ranks' events on rank 0, which writes the file. All ranks call it together."""
    mine = zlib.compress(json.dumps(named_rows(grid.rank, events) + events).encode(), 1)
    lengths = grid.all_gather_object(len(mine))
    errors = grid.all_gather_object(offset.error / 1000)
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    others = range(1, grid.size) if grid.rank == 0 else ()
    arriving = [(r, torch.empty(lengths[r], dtype=torch.uint8)) for r in others]
    leaving = [(0, sent)] if grid.rank else []
    grid.transport.exchange(arriving, leaving, grid.transport.next_tag()).wait()
    failure = None
    if grid.rank == 0:
        everyone = [mine, *(message.numpy().tobytes() for _, message in arriving)]
        whole = [event for part in everyone for event in json.loads(zlib.decompress(part))]
        try:
            _write_trace(path, whole, errors)
        except OSError as error:
            failure = str(error)
    failure = grid.all_gather_object(failure)[0]
    if failure:
        raise OSError(f"timeline: {failure}")


def _write_trace(path: Path, events: list[Event], errors: list[float]) -> None:
    begin = min((e["ts"] for e in events if "ts" in e), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - begin, 3)
    about = {
        "ranks": len(errors),
        "clock_error_us": [round(error, 1) for error in errors],
        "recorded": time.strftime("%Y-%m-%d %H:%M:%S"),
        "torch": torch.__version__,
    }
    document = {"traceEvents": events, "displayTimeUnit": "ms", "distconv": about}
    content = json.dumps(document).encode()
    if path.suffix == ".gz":
        content = gzip.compress(content)
    write_atomically(path, lambda file: file.write(content))


_ROUNDS = 10
"""Round trips with each rank; the shortest is used."""


class Offset(NamedTuple):
    """A rank's clock minus rank 0's, and the largest error of this, in nanoseconds.

    `at` is the time of the measurement by the rank's own clock.
    """

    ahead: float
    error: float
    at: int


def measure_offsets(grid: ProcessGrid, now: Callable[[], int] = time.time_ns) -> list[Offset]:
    """Return the clock offset of every rank of a grid of CPUs, in rank order.

    All of them call it together. `now` returns the time of this rank's clock in nanoseconds.
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
    """Shift a rank's events to rank 0's clock, in place, with offsets between two measured ones."""
    drift = (after.ahead - before.ahead) / max(1, after.at - before.at)
    for event in events:
        ahead = before.ahead + drift * (event["ts"] * 1000 - before.at)
        event["ts"] -= ahead / 1000
    return events


def _round_trip(grid: ProcessGrid, other: int, now: Callable[[], int]) -> tuple[float, float]:
    """Send a message from rank 0 to rank `other` and back. All ranks call it.

    Returns two numbers in nanoseconds, valid on rank `other`: the difference of its clock from rank
    0's, and the duration of the round trip. `now` returns the time of this rank's clock.
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
