"""Messages in the profiler's view, and the events of a rank in the Chrome trace format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.profiler import record_function

from distconv.comm.ledger import Movement
from distconv.grid.whereabouts import CURRENT, operator_name
from distconv.transport.interface import Message, Request, Transport
from distconv.transport.watched import WrappedTransport

_MARK = "distconv"
_numbers = count()

HALO, REDISTRIBUTION, MESSAGE = "halo", "redistribution", "message"
REDUCTION, GRADIENTS = "reduction", "gradient reduction"
KINDS = (HALO, REDISTRIBUTION, REDUCTION, GRADIENTS, MESSAGE)
"""Kinds of messages; `message` is an exchange that is neither a halo nor a redistribution."""


class Label(NamedTuple):
    """A description of messages, known when they start. The phase is "start", "wait", or "all"
    where the rank waits at once; start and wait of a message have one number. Bytes are those
    that this rank receives, or of its summand.
    """

    phase: str
    kind: str
    number: int
    bytes: int
    operator: str

    def __str__(self) -> str:
        return "|".join(map(str, (_MARK, *self)))


def label_of(name: str) -> Label | None:
    """Return the label encoded in the name of a profiler's event; None for other events."""
    parts = name.split("|", 5)
    if parts[0] != _MARK or len(parts) != 6:
        return None
    return Label(parts[1], parts[2], int(parts[3]), int(parts[4]), parts[5])


class Kinds(list[Movement]):
    """The kind of each exchange by its tag, from the movement recorded before it.

    The adjoint of a movement has the tag of the movement.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next: str | None = None
        self._of_tag: dict[int, str] = {}

    def append(self, movement: Movement) -> None:
        """Note the movement of the next exchange."""
        if not movement.plan.identity:
            self._next = REDISTRIBUTION if movement.redistributes else HALO

    def of(self, tag: int) -> str:
        """Return the kind of an exchange that starts."""
        if self._next is not None:
            self._of_tag[tag], self._next = self._next, None
        return self._of_tag.get(tag, MESSAGE)


class _TimedRequest:
    def __init__(self, request: Request, label: Label):
        self._request, self._label = request, label

    def wait(self) -> None:
        with record_function(str(self._label._replace(phase="wait"))):
            self._request.wait()


class RecordedTransport(WrappedTransport):
    """A carrier that marks its messages for the profiler; see `Transport`."""

    def __init__(self, carrier: Transport, kind_of: Callable[[int], str]):
        super().__init__(carrier)
        self._kind_of = kind_of

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        kind = self._kind_of(tag)
        if not arriving and not leaving:
            return self.carrier.exchange(arriving, leaving, tag)
        label = _label("start", kind, sum(tensor.nbytes for _, tensor in arriving))
        with record_function(str(label)):
            request = self.carrier.exchange(arriving, leaving, tag)
        return _TimedRequest(request, label)

    def all_reduce(self, tensor: Tensor, group: Any) -> Request:
        kind = GRADIENTS if "gradients" in group.purpose else REDUCTION
        label = _label("start", kind, tensor.nbytes)
        with record_function(str(label)):
            request = self.carrier.all_reduce(tensor, group)
        return _TimedRequest(request, label)

    def all_gather(self, tensor: Tensor, group: Any) -> Tensor:
        with record_function(str(_label("all", REDUCTION, tensor.nbytes * (group.size - 1)))):
            return self.carrier.all_gather(tensor, group)

    def broadcast(self, tensor: Tensor, group: Any) -> None:
        with record_function(str(_label("all", REDUCTION, tensor.nbytes))):
            self.carrier.broadcast(tensor, group)


def _label(phase: str, kind: str, received: int) -> Label:
    function, _, _ = CURRENT.call
    operator = "" if function is None else operator_name(function)
    return Label(phase, kind, next(_numbers), received, operator)


Event: TypeAlias = dict[str, Any]
"""An event of the Chrome trace format; times are in microseconds."""

ROWS = ("compute", "wait", "device")
"""The rows of a rank: torch's operators on the host, waiting for other ranks, and a GPU's work."""

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def events_of(trace: Mapping[str, Any], rank: int) -> list[Event]:
    """Return the events of a rank in a trace of torch's profiler, with times in microseconds since
    1970 by its own clock. Messages under way have asynchronous events, from their start to the
    end of the wait for them; everything else has complete events.
    """
    base = trace.get("baseTimeNanoseconds", 0) / 1000
    complete = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    events: list[Event] = []
    for event in _outermost(e for e in complete if e.get("cat") == "cpu_op"):
        events.append(_row(0, rank, event, event["name"].removeprefix("aten::")))
    for event in complete:
        if event.get("cat") in _ON_DEVICE:
            events.append(_row(2, rank, event, event["name"]))
    begun: dict[int, float] = {}
    for event in complete:
        label = label_of(event["name"]) if event.get("cat") == "user_annotation" else None
        if label is not None:
            events.extend(_of_messages(label, event, rank, begun))
    for event in events:
        event["ts"] += base
    return events


def _outermost(operators: Iterable[Event]) -> list[Event]:
    """Return torch's operators that are not called by others, thread by thread."""
    found: list[Event] = []
    ends: dict[Any, float] = {}
    for event in sorted(operators, key=lambda e: (e["ts"], -e["dur"])):
        if event["name"].startswith("aten::") and event["ts"] >= ends.get(event["tid"], 0.0):
            ends[event["tid"]] = event["ts"] + event["dur"]
            found.append(event)
    return found


def _row(row: int, rank: int, event: Event, name: str) -> Event:
    return {
        "ph": "X",
        "cat": ROWS[row],
        "name": name,
        "pid": rank,
        "tid": row,
        "ts": event["ts"],
        "dur": event["dur"],
    }


def _of_messages(label: Label, event: Event, rank: int, begun: dict[int, float]) -> list[Event]:
    """Return the events of a start, of a wait, or of both at once."""
    end = event["ts"] + event["dur"]
    if label.phase == "start":
        begun[label.number] = event["ts"]
        return []
    start = begun.pop(label.number, event["ts"])
    details = {"bytes": label.bytes, "operator": label.operator}
    common = {"cat": label.kind, "name": label.kind, "pid": rank, "id": f"{rank}.{label.number}"}
    wait = _row(1, rank, event, label.kind) | {"args": details}
    return [
        wait,
        common | {"ph": "b", "ts": start, "tid": 1, "args": details},
        common | {"ph": "e", "ts": end, "tid": 1},
    ]


def named_rows(rank: int, events: Iterable[Event]) -> list[Event]:
    """Return the events that name a rank and its rows."""
    rows = sorted({e["tid"] for e in events if e["ph"] == "X"})
    about: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", 0, {"name": f"rank {rank}"}),
        ("process_sort_index", 0, {"sort_index": rank}),
        *(("thread_name", row, {"name": ROWS[row]}) for row in rows),
    ]
    return [{"ph": "M", "name": n, "pid": rank, "tid": t, "args": a} for n, t, a in about]
