"""`python -m distconv explain` and `verify`: the layers of a module on a grid."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from math import prod
from typing import Any

import torch

from distconv.grid.process_grid import ProcessGrid
from distconv.model.input_layouts import match_layouts
from distconv.planning.recorded_step import dtype_of
from distconv.planning.recording import LayerPlan
from distconv.tools.arguments import BadArguments, complaining
from distconv.tools.commands.options import (
    Command,
    add_dtype_option,
    add_grid_option,
    add_module_options,
    add_report_option,
    dtype_named,
    is_first,
    write_report,
)
from distconv.tools.explain import explain, layer_table
from distconv.tools.factories import made_everywhere, module_from
from distconv.tools.json_lines import as_json
from distconv.tools.progress import Progress
from distconv.tools.reports.layers import explain_page, verify_page
from distconv.tools.verify import TensorComparison, comparison_table, verify
from distconv.transport.world import world


def _explain_options(parser: argparse.ArgumentParser) -> None:
    add_module_options(parser)
    add_grid_option(parser)
    add_dtype_option(parser)
    add_report_option(parser)
    parser.add_argument(
        "--rank", type=int, help="whose part is told (default: in the middle of every axis)"
    )


def _explain(arguments: argparse.Namespace) -> int:
    module = module_from(arguments.factory, arguments.seed)
    options: dict[str, Any] = {"layout": arguments.layout, "layouts": dict(arguments.layouts)}
    options |= {"dtype": dtype_named(arguments.dtype), "rank": arguments.rank, "show": False}
    first = is_first()
    show = _interrupted(
        arguments.json, lambda rows: f"{layer_table(rows)}\ninterrupted after {len(rows)} lines"
    )
    with Progress[LayerPlan](lambda layer: layer.name, show, first, "recording") as progress:
        with complaining(ValueError, RuntimeError):
            shape, grid = arguments.shape, arguments.grid
            plan = explain(module, shape, grid, progress=progress, **options)
    if first:
        print(as_json(plan, refusal=plan.refusal) if arguments.json else plan, flush=True)
        write_report(arguments.html, lambda: explain_page(plan, grid))
    return int(plan.refusal is not None)


def _interrupted(as_line: bool, text: Callable[[list[Any]], str]) -> Callable[[list[Any]], None]:
    """Return a function that prints the part of a result that there is."""

    def show(rows: list[Any]) -> None:
        parts = [json.loads(as_json(row)) for row in rows] if as_line else []
        print(json.dumps({"interrupted": True, "rows": parts}) if as_line else text(rows))

    return show


def _verify_options(parser: argparse.ArgumentParser) -> None:
    add_module_options(parser)
    add_grid_option(parser)
    add_report_option(parser)
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
    with complaining(ValueError):
        return ProcessGrid(**extents)


def _verify(arguments: argparse.Namespace) -> int:
    grid = _grid(arguments.grid, "verify")
    module = made_everywhere(arguments.factory, arguments.seed)
    layouts = dict(arguments.layouts)
    with complaining(ValueError):
        match_layouts(module, layouts)
    if arguments.float64:
        module = module.double()
    dtype = torch.float64 if arguments.float64 else dtype_of(module)
    generator = torch.Generator().manual_seed(arguments.seed)
    inputs = [torch.randn(s, generator=generator, dtype=dtype) for s in arguments.shape]
    first = grid.rank == 0
    show = _interrupted(
        arguments.json,
        lambda rows: (
            f"{comparison_table(rows, judged=False)}\n"
            f"interrupted after {len(rows)} comparisons, which are not judged"
        ),
    )
    with Progress[TensorComparison](
        lambda row: f"{row.layer} {row.kind}", show, first, "running serially"
    ) as progress:
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
        write_report(arguments.html, lambda: verify_page(verification, grid.shape))
    return int(not verification.ok)


EXPLAIN = Command(
    "tell what each layer would do on a grid, without running it", _explain_options, _explain
)
VERIFY = Command("compare every layer on a grid with the serial program", _verify_options, _verify)
