"""`python -m distconv calibrate`, `predict` and `plan`: a machine, and steps on it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from distconv.planning.calibration import calibrate
from distconv.planning.layer_layouts import plan_layouts
from distconv.planning.machine import ALLOCATOR, as_dict
from distconv.planning.pictures import draw_machine
from distconv.planning.prediction import predict
from distconv.planning.recording import LayerPlan
from distconv.planning.search import plan
from distconv.planning.trace import export_trace
from distconv.tools.arguments import byte_count, complaining, picture
from distconv.tools.commands.options import (
    Command,
    add_grid_option,
    add_report_option,
    add_step_options,
    check_alone,
    keep_times,
    loaded,
    step_options,
    write_report,
)
from distconv.tools.factories import module_from
from distconv.tools.json_lines import as_json
from distconv.tools.progress import StatusLine
from distconv.tools.reports.steps import plan_page, prediction_page
from distconv.transport.world import world


def _calibrate_options(parser: argparse.ArgumentParser) -> None:
    add, output = parser.add_argument, Path("machine.json")
    text = "where the machine is written (default: %(default)s)"
    add("--output", type=Path, default=output, metavar="FILE", help=text)
    add("--name", help="of the machine (default: that of the host)")
    add("--memory", type=byte_count, help="of a rank, as 16GiB (default: its share of the node's)")
    add("--seconds", type=float, default=40.0, help="about how long it takes (%(default)s)")
    add("--plot", type=picture, metavar="FILE", help="draw the tables into a picture")
    add("--json", action="store_true", help="print the machine as one line of JSON")


def _calibrate(arguments: argparse.Namespace) -> int:
    first = world().rank == 0
    with StatusLine(first, "calibrating") as say:
        machine = calibrate(
            arguments.name,
            seconds=arguments.seconds,
            memory=arguments.memory,
            progress=lambda part: say(f"measuring {part}"),
        )
    if not first:
        return 0
    machine.save(arguments.output)
    if arguments.plot is not None:
        draw_machine(machine, arguments.plot)
    shown = json.dumps(as_dict(machine)) if arguments.json else f"{arguments.output}: {machine}"
    print(shown, flush=True)
    if not machine.environment:
        missing = " ".join(f"{key}={value}" for key, value in ALLOCATOR.items())
        print(
            "Freed memory goes back to the system here, and is page-faulted in again in every "
            f"step. Set {missing} for jobs and for this command.",
            file=sys.stderr,
        )
    return 0


def _predict_options(parser: argparse.ArgumentParser) -> None:
    add_step_options(parser)
    add_grid_option(parser)
    add_report_option(parser)
    text = "write the step's messages for a simulator"
    parser.add_argument("--export", type=Path, metavar="FILE", help=text)


def _predict(arguments: argparse.Namespace) -> int:
    check_alone("predict")
    machine = loaded(arguments.machine)
    module = module_from(arguments.factory, arguments.seed)
    options, step = step_options(arguments), (module, arguments.shape, arguments.grid, machine)

    def recorded(layer: LayerPlan) -> None:
        say(f"recorded as far as {layer.name}; local operators are timed next")

    try:
        with complaining(ValueError, RuntimeError, OSError), StatusLine(begin="recording") as say:
            found = predict(*step, progress=recorded, **options)
            if arguments.export is not None:
                say(f"writing {arguments.export}")
                export_trace(arguments.export, *step, **options)
    finally:
        # Also of a step that cannot be predicted to its end; the trace times ranks of its own.
        keep_times(machine, arguments.machine)
    more = {"peak": found.peak, "seconds_per_sample": found.seconds_per_sample}
    print(as_json(found, critical_path=found.longest, **more) if arguments.json else found)
    write_report(arguments.html, lambda: prediction_page(found, machine))
    return 0


def _plan_options(parser: argparse.ArgumentParser) -> None:
    add_step_options(parser)
    add_report_option(parser)
    add = parser.add_argument
    add("--ranks", type=int, required=True, help="how many")
    add("--memory", type=byte_count, help="of a rank, as 16GiB (default: the machine's)")
    add("--axes", help="that may have several ranks, as sample,height,width (default: all)")
    text = "find the best layout of each layer on the best grid as well"
    add("--per-layer", action="store_true", help=text)


def _plan(arguments: argparse.Namespace) -> int:
    """Search, print the grids, and return 1 where none fits."""
    check_alone("plan")
    machine = loaded(arguments.machine)
    module = module_from(arguments.factory, arguments.seed)
    options, layers = step_options(arguments), None
    axes = None if arguments.axes is None else arguments.axes.split(",")
    search: dict[str, Any] = {"memory": arguments.memory, "axes": axes}
    with complaining(ValueError, RuntimeError), StatusLine(begin="recording all grids") as say:
        options["progress"] = say
        found = plan(module, arguments.shape, arguments.ranks, machine, **search, **options)
        if arguments.per_layer and found.fitting:
            layers = plan_layouts(module, arguments.shape, found.grid, machine, **options)
    keep_times(machine, arguments.machine)
    fits = bool(found.fitting)
    if arguments.json:
        more = {"grid": found.grid if fits else None, "reason": found.reason if fits else None}
        if layers is not None:
            more["layers"] = layers.as_json()
        print(as_json(found, **more))
    else:
        print(found, *([] if layers is None else [layers]), sep="\n")
    write_report(arguments.html, lambda: plan_page(found, layers, machine))
    return int(not fits)


CALIBRATE = Command(
    "measure the machine: messages, reductions, copies and Python, in under a minute",
    _calibrate_options,
    _calibrate,
)
PREDICT = Command(
    "predict the time and memory of a training step on a grid", _predict_options, _predict
)
PLAN = Command(
    "find the grid of a number of ranks on which a training step takes the least time",
    _plan_options,
    _plan,
)
