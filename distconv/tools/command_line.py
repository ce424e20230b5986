"""The command line, `python -m distconv COMMAND`: looks at modules, measures, starts jobs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch

from distconv.grid.process_grid import ProcessGrid
from distconv.model.input_layouts import match_layouts
from distconv.planning.recorded_step import dtype_of
from distconv.planning.recording import LayerPlan
from distconv.tools.arguments import BadArguments, RankParser
from distconv.tools.commands import bench, calibrate, launch, plan, predict, scale, timeline
from distconv.tools.commands.module_options import (
    add_dtype_option,
    add_grid_option,
    add_module_options,
)
from distconv.tools.explain import explain, layer_table
from distconv.tools.factories import made, made_everywhere
from distconv.tools.json_lines import as_json
from distconv.tools.progress import Progress
from distconv.tools.verify import Comparison, verify
from distconv.tools.verify import listed as comparisons_listed
from distconv.tools.version import __version__
from distconv.transport.world import world, world_if_rank


class Command(NamedTuple):
    """A subcommand: its purpose, its own options, and the function that runs it."""

    purpose: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status; every rank that MPI has started calls it."""
    parser = RankParser(prog="python -m distconv", description=__doc__)
    parser.add_argument("--version", action="version", version=f"distconv {__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, command in COMMANDS.items():
        of_command = commands.add_parser(name, help=command.purpose, description=command.purpose)
        command.options(of_command)
        of_command.set_defaults(command=command, complain=of_command.error)
    parsed = parser.parse_args(arguments)
    comm = world_if_rank()
    if parsed.command is None:
        if comm is None or comm.rank == 0:
            parser.print_help()
        return 2
    try:
        status: int = parsed.command.run(parsed)
    except BadArguments as error:
        parsed.complain(str(error))
    return status


def _explain_options(parser: argparse.ArgumentParser) -> None:
    add_module_options(parser)
    add_grid_option(parser)
    add_dtype_option(parser)
    parser.add_argument(
        "--rank", type=int, help="whose part is told (default: in the middle of every axis)"
    )


def _explain(arguments: argparse.Namespace) -> int:
    module = made(arguments.factory, arguments.seed)
    dtype = None if arguments.dtype is None else getattr(torch, arguments.dtype)
    options: dict[str, Any] = {"dtype": dtype, "layout": arguments.layout, "rank": arguments.rank}
    options["layouts"] = dict(arguments.layouts)

    def show(layers: list[LayerPlan]) -> None:
        if arguments.json:
            print(_interrupted(layers))
        else:
            print(layer_table(layers), f"interrupted after {len(layers)} lines", sep="\n")

    comm = world_if_rank()
    first = comm is None or comm.rank == 0
    with Progress[LayerPlan](lambda layer: layer.name, show, first) as progress:
        try:
            plan = explain(
                module,
                arguments.shape,
                arguments.grid,
                show=False,
                progress=progress,
                **options,
            )
        except (ValueError, RuntimeError) as error:
            raise BadArguments(str(error)) from None
    if first:
        print(as_json(plan, refusal=plan.refusal) if arguments.json else plan, flush=True)
    return int(plan.refusal is not None)


def _interrupted(rows: list[Any]) -> str:
    """Return the part of a result that there is, as a line of JSON."""
    return json.dumps({"interrupted": True, "rows": [json.loads(as_json(row)) for row in rows]})


def _verify_options(parser: argparse.ArgumentParser) -> None:
    add_module_options(parser)
    add_grid_option(parser)
    parser.add_argument("--float64", action="store_true", help="module and input in float64")
    parser.add_argument("--tolerance", type=float, help="largest difference that is rounding")
    parser.add_argument("--no-backward", action="store_true", help="compare no gradients")


def _grid(extents: dict[str, Any], command: str) -> ProcessGrid:
    """Return the grid of all ranks with these extents."""
    ranks = prod(extents.values())
    if min(extents.values()) > 0 and ranks != world().size:
        raise BadArguments(
            f"the grid has {ranks} ranks, but {world().size} have been started; start it "
            f"with mpiexec -n {ranks} python -m distconv {command} ..."
        )
    try:
        return ProcessGrid(**extents)
    except ValueError as error:
        raise BadArguments(str(error)) from None


def _verify(arguments: argparse.Namespace) -> int:
    grid = _grid(arguments.grid, "verify")
    module = made_everywhere(arguments.factory, arguments.seed)
    layouts = dict(arguments.layouts)
    try:
        match_layouts(module, layouts)
    except ValueError as error:
        raise BadArguments(str(error)) from None
    if arguments.float64:
        module = module.double()
    dtype = torch.float64 if arguments.float64 else dtype_of(module)
    generator = torch.Generator().manual_seed(arguments.seed)
    inputs = [torch.randn(s, generator=generator, dtype=dtype) for s in arguments.shape]

    def show(rows: list[Comparison]) -> None:
        if arguments.json:
            print(_interrupted(rows))
        else:
            after = f"interrupted after {len(rows)} comparisons, which are not judged"
            print(comparisons_listed(rows, judged=False), after, sep="\n")

    first = grid.rank == 0
    with Progress[Comparison](lambda row: f"{row.layer} {row.kind}", show, first) as progress:
        verification = verify(
            module,
            inputs,
            grid,
            layout=arguments.layout,
            layouts=layouts,
            tolerance=arguments.tolerance,
            backward=not arguments.no_backward,
            seed=arguments.seed,
            show=False,
            progress=progress,
        )
    if first:
        shown = as_json(verification, ok=verification.ok) if arguments.json else verification
        print(shown, flush=True)
    return int(not verification.ok)


COMMANDS = {
    "explain": Command(
        "tell what each layer would do on a grid, without running it", _explain_options, _explain
    ),
    "verify": Command(
        "compare every layer on a grid with the serial program", _verify_options, _verify
    ),
    "bench": Command(bench.PURPOSE, bench.options, bench.run),
    "calibrate": Command(calibrate.PURPOSE, calibrate.options, calibrate.run),
    "predict": Command(predict.PURPOSE, predict.options, predict.run),
    "plan": Command(plan.PURPOSE, plan.options, plan.run),
    "scale": Command(scale.PURPOSE, scale.options, scale.run),
    "launch": Command(launch.PURPOSE, launch.options, launch.run),
    "timeline": Command(timeline.PURPOSE, timeline.options, timeline.run),
}
