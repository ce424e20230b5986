"""The events of one rank, from those of the profiler, in the Chrome trace format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from distconv.tools.timeline.messages import Label, label_of

Event: TypeAlias = dict[str, Any]
"""An event of the Chrome trace format; times are in microseconds."""

ROWS = ("compute", "wait", "device")
"""The rows of a rank: torch's operators on the host, waiting for other ranks, and a GPU's work."""

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def events_of(trace: Mapping[str, Any], rank: int) -> list[Event]:
    """Return the events of a rank, with times in microseconds since 1970 by its own clock.

    Rows have complete events. What is under way has asynchronous events from the start of its
    messages to the end of the wait for them.

    Parameters
    ----------
    trace: what torch's profiler has exported.
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
