"""The messages that a rank has sent, with times, and its events in the Chrome trace format."""

from __future__ import annotations

import gzip
import json
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import time_ns
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.profiler import profile

from distconv.comm.ledger import Movement, trace_movements
from distconv.data.durable import write_atomically
from distconv.device.kinds import profiler_activities
from distconv.grid.communicators import WrappedTransport, carried_by
from distconv.grid.process_grid import ProcessGrid
from distconv.grid.words import CURRENT, operator_name
from distconv.planning.timeline import union_length
from distconv.torch_private import is_profiling, profiler_refused
from distconv.transport.interface import Message, Request, Transport

HALO, REDISTRIBUTION, MESSAGE = "halo", "redistribution", "message"
REDUCTION, GRADIENTS = "reduction", "gradient reduction"
KINDS = (HALO, REDISTRIBUTION, REDUCTION, GRADIENTS, MESSAGE)
"""Kinds of messages; `message` is an exchange that is neither a halo nor a redistribution."""


class PassedMessages(NamedTuple):
    """An exchange, or a reduction, that has ended on this rank; times in nanoseconds since 1970."""

    kind: str
    bytes: int
    """The bytes that this rank received, or contributed to a reduction."""
    operator: str
    """The operator that needed them."""
    start: int
    wait: int
    """The time at which the wait for them began."""
    end: int


class Kinds(list[Movement]):
    """A list to pass to `trace_movements`, which finds the kind of each exchange by its tag.

    A kind is a halo, a redistribution, or another message. The adjoint of a transfer has the tag of
    the transfer, and so the same kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next: str | None = None
        self._of_tag: dict[int, str] = {}

    def append(self, movement: Movement) -> None:
        """Find the kind of the next exchange, a halo or a redistribution, from its movement.

        `trace_movements` calls it before each exchange.
        """
        if not movement.plan.identity:
            self._next = REDISTRIBUTION if movement.redistributes else HALO

    def of(self, tag: int) -> str:
        """Return the kind of the exchange that starts now, with this tag."""
        if self._next is not None:
            self._of_tag[tag], self._next = self._next, None
        return self._of_tag.get(tag, MESSAGE)


class _TimedRequest:
    def __init__(self, request: Request, waited: Callable[[int], object]):
        self._request, self._waited = request, waited

    def wait(self) -> None:
        begun = time_ns()
        self._request.wait()
        self._waited(begun)


class RecordedTransport(WrappedTransport):
    """A transport that adds its messages to `passed`, with times; see `Transport`.

    `kind_of` returns the kind of an exchange by its tag.
    """

    def __init__(
        self, carrier: Transport, kind_of: Callable[[int], str], passed: list[PassedMessages]
    ) -> None:
        super().__init__(carrier)
        self._kind_of, self._passed = kind_of, passed

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        kind = self._kind_of(tag)
        if not arriving and not leaving:
            return self.carrier.exchange(arriving, leaving, tag)
        waited = self._started(kind, sum(tensor.nbytes for _, tensor in arriving))
        return _TimedRequest(self.carrier.exchange(arriving, leaving, tag), waited)

    def all_reduce(self, tensor: Tensor, group: Any) -> Request:
        kind = GRADIENTS if "gradients" in group.purpose else REDUCTION
        waited = self._started(kind, tensor.nbytes)
        return _TimedRequest(self.carrier.all_reduce(tensor, group), waited)

    def all_gather(self, tensor: Tensor, group: Any) -> Tensor:
        waited = self._started(REDUCTION, tensor.nbytes * (group.size - 1))
        gathered = self.carrier.all_gather(tensor, group)
        waited(0)
        return gathered

    def broadcast(self, tensor: Tensor, group: Any) -> None:
        waited = self._started(REDUCTION, tensor.nbytes)
        self.carrier.broadcast(tensor, group)
        waited(0)

    def _started(self, kind: str, received: int) -> Callable[[int], object]:
        """Return a function to call when the wait for messages that start now has ended.

        The function takes the time at which the wait began, and records the messages: their `kind`,
        the bytes `received`, and the times of their start and of the wait.
        """
        start, (function, _, _) = time_ns(), CURRENT.call
        operator = "" if function is None else operator_name(function)

        def waited(begun: int) -> None:
            times = start, max(begun, start), time_ns()
            self._passed.append(PassedMessages(kind, received, operator, *times))

        return waited


Event: TypeAlias = dict[str, Any]
"""An event of the Chrome trace format; times are in microseconds."""

ROWS = ("compute", "wait", "device")
"""The rows of a rank: torch's operators on the host, waiting for other ranks, and a GPU's work."""

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def events_of(trace: Mapping[str, Any], passed: Iterable[PassedMessages], rank: int) -> list[Event]:
    """Return the trace events of a rank, with times in microseconds since 1970 by its own clock.

    Messages under way have asynchronous events, from their start to the end of the wait for them;
    the wait itself, and everything in the trace of torch's profiler, has complete events.
    """
    base = trace.get("baseTimeNanoseconds", 0) / 1000
    complete = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    events: list[Event] = []
    for event in _outermost(e for e in complete if e.get("cat") == "cpu_op"):
        name = event["name"].removeprefix("aten::")
        events.append(_row(0, rank, name, base + event["ts"], event["dur"]))
    for event in complete:
        if event.get("cat") in _ON_DEVICE:
            events.append(_row(2, rank, event["name"], base + event["ts"], event["dur"]))
    for number, (kind, size, operator, start, wait, end) in enumerate(passed):
        args = {"args": {"bytes": size, "operator": operator}}
        common = {"cat": kind, "name": kind, "pid": rank, "tid": 1, "id": f"{rank}.{number}"}
        events += [
            _row(1, rank, kind, wait / 1000, (end - wait) / 1000) | args,
            common | {"ph": "b", "ts": start / 1000} | args,
            common | {"ph": "e", "ts": end / 1000},
        ]
    return events


def _outermost(operators: Iterable[Event]) -> list[Event]:
    """Return the events of torch's operators that no other operator calls, thread by thread."""
    found: list[Event] = []
    ends: dict[Any, float] = {}
    for event in sorted(operators, key=lambda e: (e["ts"], -e["dur"])):
        if event["name"].startswith("aten::") and event["ts"] >= ends.get(event["tid"], 0.0):
            ends[event["tid"]] = event["ts"] + event["dur"]
            found.append(event)
    return found


def _row(row: int, rank: int, name: str, begin: float, duration: float) -> Event:
    place = {"cat": ROWS[row], "name": name, "pid": rank, "tid": row}
    return {"ph": "X", **place, "ts": begin, "dur": duration}


def named_rows(rank: int, events: Iterable[Event]) -> list[Event]:
    """Return trace events that give names to a rank and to the rows of its `events`."""
    rows = sorted({e["tid"] for e in events if e["ph"] == "X"})
    about: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", 0, {"name": f"rank {rank}"}),
        ("process_sort_index", 0, {"sort_index": rank}),
        *(("thread_name", row, {"name": ROWS[row]}) for row in rows),
    ]
    return [{"ph": "M", "name": n, "pid": rank, "tid": t, "args": a} for n, t, a in about]


# `timeline`: all ranks' activities, recorded on one clock and written to one file.
#
# The clocks of ranks are compared by messages between rank 0 and each other rank, back and forth
# (Mills, "Internet Time Synchronization: the Network Time Protocol", 1991). Both ways are assumed
# to take equally long, so an offset is wrong by half of the shortest round trip at most.


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


# The sums of a timeline: each rank's seconds of computing, of waiting, and of hidden messages.


Interval = tuple[float, float]
"""Begin and end, in microseconds."""


class RankTimes(NamedTuple):
    """The sums over one rank's events in a timeline, in seconds."""

    rank: int
    seconds: float
    compute: float
    """Seconds in torch's operators."""
    wait: float
    """Seconds of waiting for other ranks."""
    under_way: dict[str, float]
    """By kind of messages, the seconds in which any were under way."""
    exposed: dict[str, float]
    """By kind of messages, the seconds in which the rank waited for them."""
    bytes: dict[str, int]
    """By kind of messages, the bytes received."""


def read_trace(path: Path) -> list[Event]:
    """Return the events in a timeline's file; raise ValueError for another file."""
    content = path.read_bytes()
    try:
        document = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    except (ValueError, OSError, EOFError):
        document = None
    if not isinstance(document, dict) or "distconv" not in document:
        raise ValueError(
            f"{path} is no timeline; record one by `with distconv.timeline({path.name!r}):`"
        )
    events: list[Event] = document["traceEvents"]
    return events


def times_of_ranks(events: Sequence[Event]) -> list[RankTimes]:
    """Return for each rank the sums of times over its events."""
    ranks = sorted({e["pid"] for e in events})
    return [_of_rank(rank, [e for e in events if e["pid"] == rank]) for rank in ranks]


def _of_rank(rank: int, events: list[Event]) -> RankTimes:
    timed = [e for e in events if "ts" in e]
    ends = [e["ts"] + e.get("dur", 0.0) for e in timed]
    span = max(ends, default=0.0) - min((e["ts"] for e in timed), default=0.0)
    under_way, exposed, received = {}, {}, {}
    for kind in KINDS:
        of_kind = [e for e in timed if e["cat"] == kind]
        waits = [e for e in timed if e["cat"] == ROWS[1] and e["name"] == kind]
        if of_kind:
            under_way[kind] = union_length(spans_under_way(of_kind)) / 1e6
            exposed[kind] = union_length(spans(waits)) / 1e6
            received[kind] = sum(e["args"]["bytes"] for e in waits)
    rows = [union_length(spans(e for e in timed if e["cat"] == row)) / 1e6 for row in ROWS]
    return RankTimes(rank, span / 1e6, max(rows[0], rows[2]), rows[1], under_way, exposed, received)


def spans(events: Iterable[Event]) -> list[Interval]:
    """Return begin and end of complete events, such as operators, in microseconds."""
    return [(e["ts"], e["ts"] + e["dur"]) for e in events]


def spans_under_way(events: Iterable[Event]) -> list[Interval]:
    """Return begin and end of asynchronous events, such as messages, in microseconds."""
    begun: dict[str, float] = {}
    found = []
    for event in events:
        if event["ph"] == "b":
            begun[event["id"]] = event["ts"]
        else:
            found.append((begun.pop(event["id"]), event["ts"]))
    return found


def times_as_text(rows: Sequence[RankTimes]) -> str:
    """Return sums as text: a line for each rank, and a line for each kind of its messages."""
    lines = []
    for row in rows:
        lines.append(
            f"rank {row.rank}: {1e3 * row.seconds:.1f} ms, computes {1e3 * row.compute:.1f} ms, "
            f"waits {1e3 * row.wait:.1f} ms"
        )
        for kind, length in row.under_way.items():
            hidden = 1 - row.exposed[kind] / length if length else 1.0
            lines.append(
                f"  {kind}: {row.bytes[kind]} bytes, under way {1e3 * length:.1f} ms, "
                f"waited for {1e3 * row.exposed[kind]:.1f} ms, {100 * hidden:.0f}% hidden"
            )
    return "\n".join(lines)
