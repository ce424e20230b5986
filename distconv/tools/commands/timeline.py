"""`python -m distconv timeline`: adds up what a timeline shows, and draws it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from distconv.tools.arguments import BadArguments, picture
from distconv.tools.timeline.picture import draw
from distconv.tools.timeline.summary import add_up, as_table, read_trace
from distconv.transport.world import world_if_rank

PURPOSE = "add up what ranks compute and wait for in a file of distconv.timeline, and draw it"


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("trace", type=Path, metavar="FILE", help="what distconv.timeline has written")
    add("--json", action="store_true", help="one line of JSON instead of a table")
    add("--plot", type=picture, metavar="FILE", help="draw the timeline into a picture")
    add("--begin", type=float, default=0.0, metavar="MS", help="of the picture (%(default)s)")
    add("--end", type=float, metavar="MS", help="of the picture (default: that of the timeline)")


def run(arguments: argparse.Namespace) -> int:
    """Print the sums, and draw the picture; rank 0 does."""
    comm = world_if_rank()
    if comm is not None and comm.rank:
        return 0
    try:
        events = read_trace(arguments.trace)
    except (OSError, ValueError) as error:
        raise BadArguments(str(error)) from None
    rows = add_up(events)
    shown = json.dumps([row._asdict() for row in rows]) if arguments.json else as_table(rows)
    print(shown, flush=True)
    if arguments.plot is not None:
        last = max((e["ts"] + e.get("dur", 0.0) for e in events if "ts" in e), default=1.0) / 1e3
        end = last if arguments.end is None else arguments.end
        if not end > arguments.begin:
            raise BadArguments(f"--end {end} is not after --begin {arguments.begin}")
        draw(events, arguments.plot, arguments.begin, end)
    return 0
