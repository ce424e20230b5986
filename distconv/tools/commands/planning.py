"""`python -m distconv calibrate`, `predict` and `plan`: a machine, and training steps on it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from distconv.grid.ranks import world
from distconv.planning.calibration import calibrate
from distconv.planning.layer_layouts import plan_layouts
from distconv.planning.machine import ALLOCATOR, as_dict
from distconv.planning.prediction import predict
from distconv.planning.search import plan
from distconv.tools.arguments import byte_count, complaining
from distconv.tools.commands import options as shared
from distconv.tools.commands.options import Command
from distconv.tools.factories import module_from
from distconv.tools.json_lines import as_json
from distconv.tools.progress import StatusLine
from distconv.tools.reports.steps import plan_page, prediction_page


def _calibrate_options(parser: argparse.ArgumentParser) -> None:
    add, output = parser.add_argument, Path("machine.json")
    text = "the file to write the machine to (default: %(default)s)"
    add("--output", type=Path, default=output, metavar="FILE", help=text)
    add("--name", help="the name of the machine (default: the host's name)")
    text = "memory of a rank, such as 16GiB (default: its share of the node's)"
    add("--memory", type=byte_count, help=text)
    add("--seconds", type=float, default=40.0, help="the approximate duration (%(default)s)")
    add("--json", action="store_true", help="print the machine as one line of JSON")


def _calibrate(given: argparse.Namespace) -> int:
    with StatusLine(world().rank == 0, "calibrating") as say:
        options = {"seconds": given.seconds, "memory": given.memory}
        machine = calibrate(given.name, progress=lambda part: say(f"measuring {part}"), **options)
    if world().rank:
        return 0
    machine.save(given.output)
    print(json.dumps(as_dict(machine)) if given.json else f"{given.output}: {machine}", flush=True)
    if not machine.environment:
        missing = " ".join(f"{key}={value}" for key, value in ALLOCATOR.items())
        print(
            "Freed memory goes back to the system here, and is page-faulted in again in every "
            f"step. Set {missing} for jobs and for this command.",
            file=sys.stderr,
        )
    return 0


def _predict_options(parser: argparse.ArgumentParser) -> None:
    shared.add_step_options(parser)
    shared.add_grid_option(parser)
    shared.add_report_option(parser)


def _predict(given: argparse.Namespace) -> int:
    shared.check_alone("predict")
    machine, module = shared.loaded(given.machine), module_from(given.factory, given.seed)
    options, step = shared.step_options(given), (module, given.shape, given.grid, machine)
    try:
        with complaining(ValueError, RuntimeError), StatusLine(begin="recording") as say:
            recorded = "recorded as far as {}; local operators are timed next"
            options["progress"] = lambda layer: say(recorded.format(layer.name))
            found = predict(*step, **options)
    finally:
        # Also of a step that cannot be predicted to its end.
        shared.keep_times(machine, given.machine)
    more = {"peak": found.peak, "seconds_per_sample": found.seconds_per_sample}
    print(as_json(found, critical_path=found.longest, **more) if given.json else found)
    shared.write_report(given.html, lambda: prediction_page(found, machine))
    return 0


def _plan_options(parser: argparse.ArgumentParser) -> None:
    shared.add_step_options(parser)
    shared.add_report_option(parser)
    add = parser.add_argument
    add("--ranks", type=int, required=True, help="the number of ranks")
    add(
        "--memory", type=byte_count, help="memory of a rank, such as 16GiB (default: the machine's)"
    )
    text = "the axes that may have several ranks, such as sample,height,width (default: all)"
    add("--axes", help=text)
    text = "find the best layout of each layer on the best grid as well"
    add("--per-layer", action="store_true", help=text)


def _plan(given: argparse.Namespace) -> int:
    """Search the grids, print them, and return the exit status: 1 if none fits."""
    shared.check_alone("plan")
    machine, module = shared.loaded(given.machine), module_from(given.factory, given.seed)
    options, layers = shared.step_options(given), None
    axes = given.axes and given.axes.split(",")
    with complaining(ValueError, RuntimeError), StatusLine(begin="recording all grids") as say:
        options["progress"] = say
        step = module, given.shape
        found = plan(*step, given.ranks, machine, memory=given.memory, axes=axes, **options)
        if given.per_layer and found.fitting:
            layers = plan_layouts(*step, found.grid, machine, **options)
    shared.keep_times(machine, given.machine)
    fits = bool(found.fitting)
    if given.json:
        more = {"grid": found.grid if fits else None, "reason": found.reason if fits else None}
        print(as_json(found, **more, **({} if layers is None else {"layers": layers.as_json()})))
    else:
        print(found, *([] if layers is None else [layers]), sep="\n")
    shared.write_report(given.html, lambda: plan_page(found, layers, machine))
    return int(not fits)


CALIBRATE = Command(
    "measure the machine: messages, reductions, packing and Python, in under a minute",
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
