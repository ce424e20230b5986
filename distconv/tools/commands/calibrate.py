"""`python -m distconv calibrate`: measures the machine that predictions are made for."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from distconv.planning.calibration import calibrate
from distconv.planning.machine import ALLOCATOR, as_dict
from distconv.planning.pictures import draw_machine
from distconv.tools.arguments import byte_count, picture
from distconv.tools.progress import StatusLine
from distconv.transport.world import world

PURPOSE = "measure the machine: messages, reductions, copies and Python, in under a minute"


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add(
        "--output",
        type=Path,
        default=Path("machine.json"),
        metavar="FILE",
        help="where the machine is written (default: %(default)s)",
    )
    add("--name", help="of the machine (default: that of the host)")
    add("--memory", type=byte_count, help="of a rank, as 16GiB (default: its share of the node's)")
    add("--seconds", type=float, default=40.0, help="about how long it takes (%(default)s)")
    add("--plot", type=picture, metavar="FILE", help="draw the tables into a picture")
    add("--json", action="store_true", help="print the machine as one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measure, and write the machine; all ranks call it."""
    first = world().rank == 0
    say = StatusLine(first)
    machine = calibrate(
        arguments.name, seconds=arguments.seconds, memory=arguments.memory, progress=say
    )
    if not first:
        return 0
    say("")
    machine.save(arguments.output)
    if arguments.plot is not None:
        draw_machine(machine, arguments.plot)
    if arguments.json:
        print(json.dumps(as_dict(machine)), flush=True)
    else:
        print(f"{arguments.output}: {machine}", flush=True)
    if not machine.environment:
        missing = " ".join(f"{key}={value}" for key, value in ALLOCATOR.items())
        print(
            "Freed memory goes back to the system here, and is page-faulted in again in every "
            f"step. Set {missing} for jobs and for this command.",
            file=sys.stderr,
        )
    return 0
