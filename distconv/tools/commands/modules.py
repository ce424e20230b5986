"""`python -m distconv explain` and `verify`: the layers of a module on a grid."""

from __future__ import annotations

import argparse
from math import prod
from typing import Any

import torch

from distconv.grid.process_grid import ProcessGrid
from distconv.grid.ranks import world
from distconv.model.input_layouts import match_layouts
from distconv.planning.recorded_step import dtype_of
from distconv.tools.arguments import BadArguments, complaining
from distconv.tools.commands import options as shared
from distconv.tools.commands.options import Command
from distconv.tools.explain import explain
from distconv.tools.factories import made_everywhere, module_from
from distconv.tools.json_lines import as_json
from distconv.tools.progress import StatusLine
from distconv.tools.reports.layers import explain_page, verify_page
from distconv.tools.verify import verify


def _explain_options(parser: argparse.ArgumentParser) -> None:
    shared.add_module_options(parser)
    shared.add_grid_option(parser)
    shared.add_dtype_option(parser)
    shared.add_report_option(parser)
    text = "the rank to show (default: the rank in the middle of every axis)"
    parser.add_argument("--rank", type=int, help=text)


def _explain(given: argparse.Namespace) -> int:
    module, grid = module_from(given.factory, given.seed), given.grid
    options: dict[str, Any] = {"layout": given.layout, "layouts": dict(given.layouts)}
    options |= {"dtype": shared.dtype_named(given.dtype), "rank": given.rank, "show": False}
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
        "--tolerance", type=float, help="the largest relative difference that is rounding"
    )
    parser.add_argument("--no-backward", action="store_true", help="compare no gradients")


def _grid(extents: dict[str, Any]) -> ProcessGrid:
    """Return a grid of all ranks; raise `BadArguments` if their number does not fit."""
    ranks = prod(extents.values())
    if min(extents.values()) > 0 and ranks != world().size:
        raise BadArguments(
            f"the grid has {ranks} ranks, but {world().size} have been started; start it "
            f"with mpiexec -n {ranks} python -m distconv verify ..."
        )
    with complaining(ValueError):
        return ProcessGrid(**extents)


def _verify(given: argparse.Namespace) -> int:
    grid = _grid(given.grid)
    module, layouts = made_everywhere(given.factory, given.seed), dict(given.layouts)
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
