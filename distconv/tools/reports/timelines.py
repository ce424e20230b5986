"""The report of `timeline`: the activities of every rank, and the messages under way."""

from __future__ import annotations

from collections.abc import Sequence

from distconv.planning.table import Cell, milliseconds, size_cell, time_cell
from distconv.tools.reports.document import COLOURS, page, section, sortable
from distconv.tools.reports.drawing import Bar, lanes
from distconv.tools.timeline import KINDS, ROWS, Event, spans, spans_under_way, times_of_ranks

MOST_RANKS = 16
"""The most ranks that are drawn."""


OF_ROWS = dict(zip((*ROWS, *KINDS), (COLOURS[i] for i in (0, 1, 0, 2, 5, 3, 6, 7)), strict=True))
"""The colours of a rank's rows, and of kinds of messages."""


def timeline_page(events: Sequence[Event], name: str, begin: float, end: float) -> str:
    """Return the HTML page of a timeline called `name`, from `begin` to `end` in seconds."""
    rows = times_of_ranks(events)
    longest = max((row.seconds for row in rows), default=0.0)
    waits = sum(row.wait for row in rows) / max(sum(row.seconds for row in rows), 1e-12)
    under_way = sum(sum(row.under_way.values()) for row in rows)
    exposed = sum(sum(row.exposed.values()) for row in rows)
    numbers = [
        (str(len(rows)), "ranks"),
        (milliseconds(longest), "recorded"),
        (f"{waits:.0%}", "of it waiting for other ranks"),
        (f"{1 - exposed / under_way:.0%}" if under_way else "none", "of messages hidden"),
    ]
    times = [
        ((str(row.rank), row.rank), *map(time_cell, (row.seconds, row.compute, row.wait)))
        for row in rows
    ]
    kinds: list[list[Cell]] = [
        [
            (str(row.rank), row.rank),
            kind,
            size_cell(row.bytes[kind]),
            time_cell(length),
            time_cell(row.exposed[kind]),
            _share(length - row.exposed[kind], length),
        ]
        for row in rows
        for kind, length in row.under_way.items()
    ]
    headings = ("rank", "messages", "received", "under way, ms", "waited for, ms", "hidden")
    sections = [
        section("Ranks", sortable([("rank", "recorded, ms", "computes", "waits"), *times])),
        *(
            section(f"Rank {row.rank}", _lanes_of(events, row.rank, begin, end))
            for row in rows[:MOST_RANKS]
        ),
        section("Messages", sortable([headings, *kinds])),
    ]
    about = "What every rank does, on one clock, and what is under way meanwhile."
    return page(f"Timeline {name}", about, numbers, sections)


def _share(part: float, whole: float) -> Cell:
    return (f"{part / whole:.0%}", part / whole) if whole else ""


def _lanes_of(events: Sequence[Event], rank: int, begin: float, end: float) -> str:
    mine = [e for e in events if e["pid"] == rank and "ts" in e]
    rows: dict[str, list[Bar]] = {}
    for row in (ROWS[2], ROWS[0], ROWS[1], *KINDS):
        chosen = [e for e in mine if e["cat"] == row]
        named = [e["name"] for e in chosen if e["ph"] == "X"] or [row] * len(chosen)
        pairs = spans_under_way(chosen) if row in KINDS else spans(chosen)
        within = [
            Bar(max(a / 1e6, begin), min(b / 1e6, end), OF_ROWS[row], title)
            for (a, b), title in zip(pairs, named, strict=False)
            if b / 1e6 > begin and a / 1e6 < end
        ]
        if within:
            rows[row] = within
    return lanes(rows, begin, end)
