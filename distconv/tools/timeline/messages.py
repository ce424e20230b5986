"""The messages that a rank has sent, with times, and its events in the Chrome trace format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import time_ns
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from distconv.comm.ledger import Movement
from distconv.grid.calls import CURRENT, operator_name
from distconv.grid.watched import WrappedTransport
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
