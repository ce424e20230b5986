"""`python -m distconv explain`, `verify`, `calibrate`, `predict`, `plan` and `timeline`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from distconv.grid.ranks import world
from distconv.model.layouts import match_layouts
from distconv.planning.calibration import calibrate
from distconv.planning.layer_layouts import plan_layouts
from distconv.planning.machine import ALLOCATOR, Machine, as_dict
from distconv.planning.prediction import predict
from distconv.planning.recorded_step import dtype_of
from distconv.planning.search import plan
from distconv.tools import command_line as shared
from distconv.tools.command_line import BadArguments, Command, StatusLine, as_json, complaining
from distconv.tools.explain import explain
from distconv.tools.reports.pages import (
    explain_page,
    plan_page,
    prediction_page,
    timeline_page,
    verify_page,
)
from distconv.tools.timeline import read_trace, times_as_text, times_of_ranks
from distconv.tools.verify import verify

# `python -m distconv explain` and `verify`: the layers of a module on a grid.


def _explain_options(parser: argparse.ArgumentParser) -> None:
    shared.add_module_options(parser)
    shared.add_grid_option(parser)
    shared.add_dtype_option(parser)
    shared.add_memory_options(parser)
    shared.add_report_option(parser)
    text = "the rank to show (default: the rank in the middle of every axis)"
    parser.add_argument("--rank", type=int, help=text)


def _explain(given: argparse.Namespace) -> int:
    module, grid = shared.module_from(given.factory, given.seed), given.grid
    options: dict[str, Any] = {"layout": given.layout, "layouts": dict(given.layouts)}
    options |= {"dtype": shared.dtype_named(given.dtype), "rank": given.rank, "show": False}
    options |= shared.memory_options(given)
    with complaining(ValueError, RuntimeError), StatusLine(shared.is_first(), "recording") as say:
        options["progress"] = lambda layer: say(layer.name)
        plan = explain(module, given.shape, grid, **options)
    if shared.is_first():
        print(as_json(plan, refusal=plan.refusal) if given.json else plan, flush=True)
        shared.write_report(given.html, lambda: explain_page(plan, grid))
    return int(plan.refusal is not None)


def _verify_options(parser: argparse.ArgumentParser) -> None:
    shared.add_module_options(parser)
    shared.add_grid_option(parser)
    shared.add_report_option(parser)
    parser.add_argument("--float64", action="store_true", help="run module and inputs in float64")
    parser.add_argument(
        "--tolerance", type=float, help="the largest relative difference that counts as rounding"
    )
    parser.add_argument("--no-backward", action="store_true", help="do not compare gradients")


def _verify(given: argparse.Namespace) -> int:
    grid = shared.grid_of_all_ranks(given.grid, "verify")
    module, layouts = shared.made_everywhere(given.factory, given.seed), dict(given.layouts)
    with complaining(ValueError):
        match_layouts(module, layouts)
    if given.float64:
        module = module.double()
    dtype = torch.float64 if given.float64 else dtype_of(module)
    generator = torch.Generator().manual_seed(given.seed)
    inputs = [torch.randn(s, generator=generator, dtype=dtype) for s in given.shape]
    options: dict[str, Any] = {"layout": given.layout, "layouts": layouts, "show": False}
    options |= {"tolerance": given.tolerance, "backward": not given.no_backward}
    with StatusLine(grid.rank == 0, "running serially") as say:
        options["progress"] = lambda row: say(f"{row.layer} {row.kind}")
        found = verify(module, inputs, grid, seed=given.seed, **options)
    if grid.rank == 0:
        print(as_json(found, ok=found.ok) if given.json else found, flush=True)
        shared.write_report(given.html, lambda: verify_page(found, grid.shape))
    return int(not found.ok)


EXPLAIN = Command(
    "show the work of each layer on a grid, without running it", _explain_options, _explain
)
VERIFY = Command("compare every layer on a grid with the serial program", _verify_options, _verify)


# `python -m distconv calibrate`, `predict` and `plan`: a machine, and training steps on it.


def _calibrate_options(parser: argparse.ArgumentParser) -> None:
    add, output = parser.add_argument, Path("machine.json")
    text = "the file to write the machine to (default: %(default)s)"
    add("--output", type=Path, default=output, metavar="FILE", help=text)
    add("--name", help="the name of the machine (default: the host's name)")
    text = "memory of a rank, such as 16GiB (default: its share of the node's)"
    add("--memory", type=shared.byte_count, help=text)
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
            "Freed memory is returned to the system here, so every step causes new page faults. "
            f"Set {missing} for jobs and for this command.",
            file=sys.stderr,
        )
    return 0


def _add_graph_option(parser: argparse.ArgumentParser) -> None:
    text = "the step is replayed as a graph of the device, by dc.compile"
    parser.add_argument("--graph", action="store_true", help=text)


def _as_run(machine: Machine, given: argparse.Namespace) -> Machine:
    """Return `machine`, or for `--graph` the machine that replays steps (`Machine.in_graph`)."""
    if not given.graph:
        return machine
    if given.shard or given.shard_parameters:
        raise BadArguments("steps with sharded weights are not captured as graphs; omit --graph")
    with complaining(ValueError):
        return machine.in_graph()


def _predict_options(parser: argparse.ArgumentParser) -> None:
    shared.add_step_options(parser)
    _add_graph_option(parser)
    shared.add_grid_option(parser)
    shared.add_report_option(parser)


def _predict(given: argparse.Namespace) -> int:
    shared.check_alone("predict")
    machine, module = shared.loaded(given.machine), shared.module_from(given.factory, given.seed)
    options = shared.step_options(given)
    step = module, given.shape, given.grid, _as_run(machine, given)
    try:
        with complaining(ValueError, RuntimeError), StatusLine(begin="recording") as say:
            recorded = "recorded as far as {}; local operators are timed next"
            options["progress"] = lambda layer: say(recorded.format(layer.name))
            found = predict(*step, **options)
    finally:
        # The times are also saved if the prediction fails.
        shared.keep_times(machine, given.machine)
    more = {"peak": found.peak, "seconds_per_sample": found.seconds_per_sample}
    print(as_json(found, critical_path=found.longest, **more) if given.json else found)
    shared.write_report(given.html, lambda: prediction_page(found, machine))
    return 0


def _plan_options(parser: argparse.ArgumentParser) -> None:
    shared.add_step_options(parser)
    _add_graph_option(parser)
    shared.add_report_option(parser)
    add = parser.add_argument
    add("--ranks", type=int, required=True, help="the number of ranks")
    text = "memory of a rank, such as 16GiB (default: the machine's)"
    add("--memory", type=shared.byte_count, help=text)
    text = "the axes that may have more than one rank, such as sample,height,width (default: all)"
    add("--axes", help=text)
    text = "also find the best layout of each layer on the best grid"
    add("--per-layer", action="store_true", help=text)


def _plan(given: argparse.Namespace) -> int:
    """Search the grids, print them, and return the exit status: 1 if none fits."""
    shared.check_alone("plan")
    machine, module = shared.loaded(given.machine), shared.module_from(given.factory, given.seed)
    options, layers = shared.step_options(given), None
    axes = given.axes and given.axes.split(",")
    seen = _as_run(machine, given)
    with complaining(ValueError, RuntimeError), StatusLine(begin="recording all grids") as say:
        options["progress"] = say
        step = module, given.shape
        found = plan(*step, given.ranks, seen, memory=given.memory, axes=axes, **options)
        if given.per_layer and found.fitting:
            layers = plan_layouts(*step, found.grid, seen, **options)
    shared.keep_times(machine, given.machine)
    fits = bool(found.fitting)
    if given.json:
        more = {"grid": found.grid if fits else None, "reason": found.reason if fits else None}
        if layers is not None:
            more["layers"] = layers.as_json()
        print(as_json(found, **more))
    else:
        print(found if layers is None else f"{found}\n{layers}")
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
    "find the grid on which a training step takes the least time",
    _plan_options,
    _plan,
)


# `python -m distconv timeline`: sums the times in a file that `distconv.timeline` wrote.


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", type=Path, metavar="FILE", help="a file written by distconv.timeline")
    add("--json", action="store_true", help="print one line of JSON instead of a table")
    shared.add_report_option(parser)
    add(
        "--begin",
        type=float,
        default=0.0,
        metavar="MS",
        help="the start of the interval to draw (%(default)s)",
    )
    add(
        "--end",
        type=float,
        metavar="MS",
        help="the end of the interval to draw (default: the timeline's)",
    )


def _run(given: argparse.Namespace) -> int:
    """Print the sums of each rank's times, and write the report, on rank 0; return the status."""
    if not shared.is_first():
        return 0
    with complaining(OSError, ValueError):
        events = read_trace(given.trace)
    rows = times_of_ranks(events)
    shown = json.dumps([row._asdict() for row in rows]) if given.json else times_as_text(rows)
    print(shown, flush=True)
    last = max((e["ts"] + e.get("dur", 0.0) for e in events if e["ph"] != "M"), default=1.0) / 1e3
    begin, end = given.begin, last if given.end is None else given.end
    if not end > begin:
        raise BadArguments(f"--end {end} is not after --begin {begin}")
    name = given.trace.name
    shared.write_report(given.html, lambda: timeline_page(events, name, begin / 1e3, end / 1e3))
    return 0


TIMELINE = Command(
    "sum the computation and waits of every rank in a file of distconv.timeline, and draw them",
    _options,
    _run,
)
