"""`timeline`: write what all ranks do, on one clock, to a file of trace events; sum its times.

torch.profiler records the operators of a rank. A transport records when messages start, and marks
each wait for messages in torch's own trace (`torch.profiler.record_function`).
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.profiler import profile, record_function

from distconv.comm.ledger import Movement, trace_movements
from distconv.data.durable import write_atomically
from distconv.device.kinds import profiler_activities
from distconv.grid.communicators import carried_by
from distconv.grid.journal import WrappedTransport
from distconv.grid.process_grid import ProcessGrid
from distconv.grid.words import CURRENT, operator_name
from distconv.planning.timeline import union_length
from distconv.torch_private import is_profiling, profiler_refused
from distconv.transport.interface import Message, Request, Transport

HALO, REDISTRIBUTION, MESSAGE = "halo", "redistribution", "message"
REDUCTION, GRADIENTS = "reduction", "gradient reduction"
KINDS = (HALO, REDISTRIBUTION, REDUCTION, GRADIENTS, MESSAGE)
"""Kinds of messages; `message` is an exchange that is neither a halo nor a redistribution."""

ROWS = ("compute", "wait", "device")
"""The rows of a rank: torch's operators on the host, waits for other ranks, and a GPU's work."""

_WAIT = "wait for "
"""The beginning of the name of a wait's event, followed by the kind of messages."""

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_RECORDED = ("cpu_op", "user_annotation", *_ON_DEVICE)
"""The categories of torch's trace events that a timeline keeps."""


Event: TypeAlias = dict[str, Any]
"""An event of the Chrome trace format; times are in microseconds."""


class _MessagesInFlight:
    """Messages that start now, and a context around the wait for their completion.

    `messages` gets an event at the start, and another at the end of the wait, with times in
    nanoseconds since 1970. `received` is the bytes that this rank receives, or contributes to a
    reduction.
    """

    def __init__(self, kind: str, received: int, messages: list[Event]) -> None:
        function = CURRENT.call[0]
        operator = "" if function is None else operator_name(function)
        self._messages = messages
        self._event: Event = {"cat": kind, "name": kind, "tid": 0, "id": len(messages)}
        self._add("b", args={"bytes": received, "operator": operator})

    def _add(self, phase: str, **more: Any) -> None:
        self._messages.append(self._event | {"ph": phase, "ts": time.time_ns(), **more})

    def __enter__(self) -> None:
        self._wait = record_function(_WAIT + self._event["cat"]).__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._wait.__exit__(*exception)
        self._add("e")


class _RecordedRequest:
    def __init__(self, request: Request, under_way: _MessagesInFlight):
        self._request, self._under_way = request, under_way

    def wait(self) -> None:
        with self._under_way:
            self._request.wait()


class RecordedTransport(WrappedTransport):
    """A transport that adds an event to `messages` for each start and end of messages.

    `movements` is the list of `trace_movements`, to which the library adds the transfer just before
    its exchange. Only the first exchange of a tag has an entry. The adjoint of a transfer has the
    same tag, and so the same kind.
    """

    def __init__(
        self, carrier: Transport, movements: list[Movement], messages: list[Event]
    ) -> None:
        super().__init__(carrier)
        self._movements, self._messages = movements, messages
        self._kind_of_tag: dict[int, str] = {}

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        for movement in self._movements:
            if not movement.plan.identity:
                self._kind_of_tag[tag] = REDISTRIBUTION if movement.redistributes else HALO
        self._movements.clear()
        if not arriving and not leaving:
            return self.carrier.exchange(arriving, leaving, tag)
        kind = self._kind_of_tag.get(tag, MESSAGE)
        under_way = self._start(kind, sum(tensor.nbytes for _, tensor in arriving))
        return _RecordedRequest(self.carrier.exchange(arriving, leaving, tag), under_way)

    def all_reduce(self, tensor: Tensor, group: Any) -> Request:
        under_way = self._start(
            GRADIENTS if "gradients" in group.purpose else REDUCTION, tensor.nbytes
        )
        return _RecordedRequest(self.carrier.all_reduce(tensor, group), under_way)

    def all_gather(self, tensor: Tensor, group: Any) -> Tensor:
        with self._start(REDUCTION, tensor.nbytes * (group.size - 1)):
            return self.carrier.all_gather(tensor, group)

    def broadcast(self, tensor: Tensor, group: Any) -> None:
        with self._start(REDUCTION, tensor.nbytes):
            self.carrier.broadcast(tensor, group)

    def _start(self, kind: str, received: int) -> _MessagesInFlight:
        return _MessagesInFlight(kind, received, self._messages)


def events_of(
    trace: Mapping[str, Any], messages: Iterable[Event], rank: int, since: int
) -> list[Event]:
    """Return the trace events of a rank, with times in microseconds by its own clock.

    Times are relative to `since`, in nanoseconds since 1970. In microseconds since 1970, a double
    would be wrong by a quarter of a microsecond, and operators would seem to overlap.

    Operators, kernels and waits are the events of torch's profiler in `trace`, with the rank in
    place of the process. `messages` are events of a `RecordedTransport`, from the start of messages
    to the end of the wait.
    """
    base = (trace.get("baseTimeNanoseconds", 0) - since) / 1000
    names = ("process_name", {"name": f"rank {rank}"}), ("process_sort_index", {"sort_index": rank})
    events = [{"ph": "M", "name": name, "pid": rank, "tid": 0, "args": of} for name, of in names]
    for event in messages:
        ts, number = (event["ts"] - since) / 1000, f"{rank}.{event['id']}"
        events.append(event | {"pid": rank, "ts": ts, "id": number})
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event.get("cat") in _RECORDED:
            events.append(event | {"pid": rank, "ts": base + event["ts"]})
    threads = {event["tid"] for event in events}
    for event in trace["traceEvents"]:
        if event["name"] == "thread_name" and event["tid"] in threads:
            events.append(event | {"pid": rank, "ts": 0.0})
    return events


# The clocks of ranks are compared by messages between rank 0 and each other rank, back and forth
# (Mills, "Internet Time Synchronization: the Network Time Protocol", 1991). Both ways are assumed
# to take equally long, so an offset is wrong by half of the shortest round trip at most.


@contextmanager
def timeline(path: str | Path, grid: ProcessGrid | None = None) -> Iterator[None]:
    """Record the activities of all ranks in a `with` block, and write them to a file. Collective.

    All ranks enter and leave the block together; torch.profiler records. At the end rank 0 writes
    the file in one step. After an error within the block nothing is written. Open the file in
    Perfetto (https://ui.perfetto.dev), chrome://tracing or TensorBoard, or print the sums of its
    times by `python -m distconv timeline FILE`.

    Each rank is a process with torch's operators, `wait for` other ranks, and on a GPU its kernels.
    Halos, redistributions, reductions and messages are shown from their start to the end of the
    wait. Times of all ranks are on the clock of rank 0, from round trips of messages at the
    beginning and at the end.

    Raises OSError on every rank, if rank 0 cannot write the file. Raises RuntimeError on every
    rank, if torch's profiler is recording on any rank already; and within the block, if the program
    starts the profiler.

    Parameters
    ----------
    path: the path of the file; a file ending with .gz is compressed.
    grid: the ranks that take part; all of the job when not given.

    Examples
    --------
    >>> grid = dc.ProcessGrid(height=2)
    >>> model = dc.parallelize(nn.Conv2d(1, 1, 3, padding=1), grid)
    >>> x = dc.distribute_tensor(torch.ones(1, 1, 64, 64), grid)
    >>> with dc.timeline("trace.json", grid):
    ...     model(x).sum().backward()
    >>> from pathlib import Path
    >>> Path("trace.json").exists()
    True
    """
    path = Path(path)
    # A grid of the same ranks, which sends messages between hosts.
    grid = ProcessGrid(None if grid is None else grid.ranks, sample=-1, device="cpu")
    missing = None if grid.rank or path.absolute().parent.is_dir() else str(path.absolute().parent)
    everyone = grid.all_gather_object((missing, is_profiling()))
    if any(profiled for _, profiled in everyone):
        raise RuntimeError(f"timeline: torch's profiler is recording already. {_ONE_AT_A_TIME}")
    missing = everyone[0][0]
    if missing:
        raise FileNotFoundError(f"timeline: there is no folder {missing}; create it first")
    before = measure_offsets(grid)
    movements, messages = list[Movement](), list[Event]()
    with (
        profile(activities=profiler_activities()) as recorded,
        profiler_refused(_refuse_profiler),
        trace_movements(movements),
        carried_by(lambda transport: RecordedTransport(transport.carrier, movements, messages)),
    ):
        yield
    after = measure_offsets(grid)[grid.rank]
    mine = before[grid.rank]
    events = _exported(recorded, messages, grid.rank, mine.at)
    _write(path, grid, on_clock_of_rank_0(events, mine, after, before[0].at), after)


_ONE_AT_A_TIME = (
    "It records one profile at a time: end one recording before the other begins. python -m "
    "distconv timeline FILE sums the operators and messages of a timeline"
)


def _refuse_profiler(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(f"torch.profiler within dc.timeline(). {_ONE_AT_A_TIME}")


def _exported(recorded: Any, messages: list[Event], rank: int, since: int) -> list[Event]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(file))
        return events_of(json.loads(file.read_text()), messages, rank, since)


def _write(path: Path, grid: ProcessGrid, events: list[Event], offset: Offset) -> None:
    """Gather all ranks' events on rank 0, which writes the file. Collective."""
    mine = zlib.compress(json.dumps(events).encode(), 1)
    lengths, errors = zip(*grid.all_gather_object((len(mine), offset.error / 1000)), strict=True)
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


def _write_trace(path: Path, events: list[Event], errors: Sequence[float]) -> None:
    timed = [event for event in events if event["ph"] != "M"]
    begin = min((event["ts"] for event in timed), default=0.0)
    for event in timed:
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
"""Round trips with each rank; the shortest round trip is used."""


class Offset(NamedTuple):
    """The offset of a rank's clock from rank 0's, with an error bound; times are in nanoseconds.

    `ahead` is the rank's time minus rank 0's, `error` the largest error of `ahead`, and `at` the
    time of the measurement by the rank's own clock.
    """

    ahead: float
    error: float
    at: int


def measure_offsets(grid: ProcessGrid, now: Callable[[], int] = time.time_ns) -> list[Offset]:
    """Return the clock offset of every rank of a grid of CPUs, in rank order. Collective.

    `now` returns the time of this rank's clock in nanoseconds.
    """
    offsets = [Offset(0.0, 0.0, now())]
    for other in range(1, grid.size):
        trips = [_round_trip(grid, other, now) for _ in range(_ROUNDS)]
        offsets.append(min(trips, key=lambda trip: trip.error))
    return [Offset(*offset) for offset in grid.all_gather_object([*map(tuple, offsets)])[0]]


def _round_trip(grid: ProcessGrid, other: int, now: Callable[[], int]) -> Offset:
    """Return the clock offset of rank `other`, by a message from rank 0 and its reply. Collective.

    The result is valid on rank 0.
    """
    begin = now()
    _send(grid, 0, other, torch.zeros(1, dtype=torch.int64))
    there = torch.tensor([now()])
    _send(grid, other, 0, there)
    end, at = now(), int(there)
    return Offset(at - (begin + end) / 2, (end - begin) / 2, at)


def _send(grid: ProcessGrid, source: int, target: int, message: Tensor) -> None:
    """Send `message` of rank `source` to `message` of rank `target`. Collective."""
    arriving = [(source, message)] if grid.rank == target else []
    leaving = [(target, message)] if grid.rank == source else []
    grid.transport.exchange(arriving, leaving, grid.transport.next_tag()).wait()


def on_clock_of_rank_0(
    events: list[Event], before: Offset, after: Offset, since: int
) -> list[Event]:
    """Convert the times of a rank's events to rank 0's clock, in place.

    The clock's offset is interpolated between `before` and `after`. Times are microseconds since
    `before.at`. They become microseconds since `since`, a time of rank 0's clock in nanoseconds.
    """
    drift = (after.ahead - before.ahead) / max(1, after.at - before.at)
    for event in events:
        if event["ph"] != "M":
            ahead = before.ahead + drift * 1000 * event["ts"]
            event["ts"] += (before.at - since - ahead) / 1000
    return events


# The sums of a timeline: each rank's seconds of computing, waiting, and messages in flight.


class RankTimes(NamedTuple):
    """The sums over one rank's events in a timeline, in seconds."""

    rank: int
    seconds: float
    compute: float
    """Seconds in torch's operators, or of a GPU's work if that is longer."""
    wait: float
    """Seconds of waiting for other ranks."""
    under_way: dict[str, float]
    """Seconds in which messages of a kind were in flight, by kind."""
    exposed: dict[str, float]
    """Seconds in which the rank waited for messages of a kind, by kind."""
    bytes: dict[str, int]
    """Bytes received in messages of a kind, by kind."""


def read_trace(path: Path) -> list[Event]:
    """Return the events in a timeline's file; raise ValueError for any other file."""
    content = path.read_bytes()
    try:
        document = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    except (ValueError, OSError, EOFError):
        document = None
    if not isinstance(document, dict) or "distconv" not in document:
        raise ValueError(
            f"{path} is not a timeline; record one by `with distconv.timeline({path.name!r}):`"
        )
    events: list[Event] = document["traceEvents"]
    return events


def times_of_ranks(events: Sequence[Event]) -> list[RankTimes]:
    """Return the sums of times over the events of each rank, in the order of ranks."""
    of_ranks: dict[int, list[Event]] = {}
    for event in events:
        if event["ph"] != "M":
            of_ranks.setdefault(event["pid"], []).append(event)
    return [_of_rank(rank, of_ranks[rank]) for rank in sorted(of_ranks)]


def _of_rank(rank: int, events: list[Event]) -> RankTimes:
    begin = min(e["ts"] for e in events)
    end = max(e["ts"] + e.get("dur", 0.0) for e in events)
    kinds = [kind for kind in KINDS if any(e["cat"] == kind for e in events)]
    waits = spans(events, "wait")
    compute, device = (_seconds(spans(events, row)) for row in ("compute", "device"))
    return RankTimes(
        rank,
        (end - begin) / 1e6,
        max(compute, device),
        _seconds(waits),
        {kind: _seconds(spans(events, kind)) for kind in kinds},
        {kind: _seconds([wait for wait in waits if wait.name == kind]) for kind in kinds},
        {
            kind: sum(e["args"]["bytes"] for e in events if e["cat"] == kind and e["ph"] == "b")
            for kind in kinds
        },
    )


class Span(NamedTuple):
    """An operator, a wait, or messages in flight; times are in microseconds."""

    begin: float
    end: float
    name: str


def spans(events: Iterable[Event], row: str) -> list[Span]:
    """Return the intervals of a rank's events in a row, one of `ROWS` or `KINDS`.

    Operators include those that another operator calls. The name of a wait is the kind of messages.
    """
    if row in KINDS:
        return _under_way(e for e in events if e.get("cat") == row)
    found = []
    for event in events:
        category, name = event.get("cat"), event["name"]
        if category == "cpu_op" and name.startswith("aten::"):
            of, name = "compute", name.removeprefix("aten::")
        elif category == "user_annotation" and name.startswith(_WAIT):
            of, name = "wait", name.removeprefix(_WAIT)
        else:
            of = "device" if category in _ON_DEVICE else ""
        if of == row:
            found.append(Span(event["ts"], event["ts"] + event["dur"], name))
    return found


def _under_way(events: Iterable[Event]) -> list[Span]:
    begun: dict[str, float] = {}
    found = []
    for event in events:
        if event["ph"] == "b":
            begun[event["id"]] = event["ts"]
        else:
            found.append(Span(begun.pop(event["id"]), event["ts"], event["name"]))
    return found


def _seconds(found: Iterable[Span]) -> float:
    return union_length((span.begin, span.end) for span in found) / 1e6


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
                f"  {kind}: {row.bytes[kind]} bytes, in flight {1e3 * length:.1f} ms, "
                f"waited for {1e3 * row.exposed[kind]:.1f} ms, {100 * hidden:.0f}% overlapped"
            )
    return "\n".join(lines)
