"""The sums of a timeline: each rank's seconds of computing, of waiting, and of hidden messages."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from distconv.planning.timeline import union_length
from distconv.tools.timeline.messages import KINDS, ROWS, Event

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
