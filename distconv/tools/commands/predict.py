"""`python -m distconv predict`: the time and memory of a training step on a grid."""

from __future__ import annotations

import argparse
from pathlib import Path

from distconv.planning.prediction import predict
from distconv.planning.trace import export_trace
from distconv.tools.arguments import BadArguments
from distconv.tools.commands.module_options import add_grid_option
from distconv.tools.commands.step_options import (
    add_step_options,
    check_alone,
    keep_times,
    loaded,
    step_of,
)
from distconv.tools.factories import made
from distconv.tools.json_lines import as_json
from distconv.tools.progress import StatusLine

PURPOSE = "predict the time and memory of a training step on a grid"


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_step_options(parser)
    add_grid_option(parser)
    parser.add_argument(
        "--export", type=Path, metavar="FILE", help="write the step's messages for a simulator"
    )


def run(arguments: argparse.Namespace) -> int:
    """Predict, and print the step.

    Raises
    ------
    BadArguments
        Where the module cannot run on the grid, the machine lacks what is asked of it, or the trace
        cannot be written.
    """
    check_alone("predict")
    machine = loaded(arguments.machine)
    module = made(arguments.factory, arguments.seed)
    say = StatusLine()
    try:
        step = predict(
            module,
            arguments.shape,
            arguments.grid,
            machine,
            progress=lambda layer: say(f"recorded {layer.name}"),
            **step_of(arguments),
        )
        say("")
        if arguments.export is not None:
            export_trace(
                arguments.export,
                module,
                arguments.shape,
                arguments.grid,
                machine,
                **step_of(arguments),
            )
    except (ValueError, RuntimeError, OSError) as error:
        raise BadArguments(str(error)) from None
    finally:
        # Also of a step that cannot be predicted to its end; the trace times ranks of its own.
        keep_times(machine, arguments.machine)
    if arguments.json:
        more = {"peak": step.peak, "seconds_per_sample": step.seconds_per_sample}
        print(as_json(step, critical_path=step.longest, **more))
    else:
        print(step)
    return 0
