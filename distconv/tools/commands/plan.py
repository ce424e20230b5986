"""`python -m distconv plan`: the best grid for a number of ranks, and the best layouts on it."""

from __future__ import annotations

import argparse
from typing import Any

from distconv.planning.layer_layouts import LayoutPlan, plan_layouts
from distconv.planning.search import plan
from distconv.tools.arguments import BadArguments, byte_count
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

PURPOSE = "find the grid of a number of ranks on which a training step takes the least time"


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_step_options(parser)
    add = parser.add_argument
    add("--ranks", type=int, required=True, help="how many")
    add("--memory", type=byte_count, help="of a rank, as 16GiB (default: the machine's)")
    add("--axes", help="that may have several ranks, as sample,height,width (default: all)")
    add(
        "--per-layer",
        action="store_true",
        help="find the best layout of each layer on the best grid as well",
    )


def run(arguments: argparse.Namespace) -> int:
    """Search, print the grids, and return 1 where none fits.

    Raises
    ------
    BadArguments
        Where there is no grid of so many ranks, or the machine lacks what is asked of it.
    """
    check_alone("plan")
    machine = loaded(arguments.machine)
    module = made(arguments.factory, arguments.seed)
    say = StatusLine()
    chosen: dict[str, Any] = step_of(arguments)
    layers: LayoutPlan | None = None
    try:
        found = plan(
            module,
            arguments.shape,
            arguments.ranks,
            machine,
            memory=arguments.memory,
            axes=None if arguments.axes is None else arguments.axes.split(","),
            progress=say,
            **chosen,
        )
        if arguments.per_layer and found.fitting:
            layers = plan_layouts(module, arguments.shape, found.grid, machine, **chosen)
    except (ValueError, RuntimeError) as error:
        raise BadArguments(str(error)) from None
    say("")
    keep_times(machine, arguments.machine)
    fits = bool(found.fitting)
    if arguments.json:
        more = {"grid": found.grid if fits else None, "reason": found.reason if fits else None}
        if layers is not None:
            more["layers"] = layers.as_json()
        print(as_json(found, **more))
    else:
        print(found, *([] if layers is None else [layers]), sep="\n")
    return int(not fits)
