"""`python -m distconv timeline`: adds up the times in a file that `distconv.timeline` wrote."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from distconv.tools.arguments import BadArguments, complaining
from distconv.tools.commands.options import Command, add_report_option, is_first, write_report
from distconv.tools.reports.timelines import timeline_page
from distconv.tools.timeline.report import read_trace, times_as_text, times_of_ranks


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", type=Path, metavar="FILE", help="a file written by distconv.timeline")
    add("--json", action="store_true", help="print one line of JSON instead of a table")
    add_report_option(parser)
    add(
        "--begin",
        type=float,
        default=0.0,
        metavar="MS",
        help="the beginning of drawings (%(default)s)",
    )
    add("--end", type=float, metavar="MS", help="the end of drawings (default: the timeline's)")


def _run(given: argparse.Namespace) -> int:
    """Print each rank's sums of times, and write the report, on rank 0."""
    if not is_first():
        return 0
    with complaining(OSError, ValueError):
        events = read_trace(given.trace)
    rows = times_of_ranks(events)
    shown = json.dumps([row._asdict() for row in rows]) if given.json else times_as_text(rows)
    print(shown, flush=True)
    last = max((e["ts"] + e.get("dur", 0.0) for e in events if "ts" in e), default=1.0) / 1e3
    begin, end = given.begin, last if given.end is None else given.end
    if not end > begin:
        raise BadArguments(f"--end {end} is not after --begin {begin}")
    name = given.trace.name
    write_report(given.html, lambda: timeline_page(events, name, begin / 1e3, end / 1e3))
    return 0


TIMELINE = Command(
    "add up what ranks compute and wait for in a file of distconv.timeline, and draw it",
    _options,
    _run,
)
