"""The options by which commands name a module, its inputs, and the grid."""

from __future__ import annotations

import argparse

from distconv.tools.arguments import grid_axes, layout, pattern_and_layout, shape

DTYPES = ("float32", "float64", "bfloat16", "float16")


def add_module_options(parser: argparse.ArgumentParser) -> None:
    """Add the module, the shapes of its inputs, the layouts, the seed, and `--json`."""
    add = parser.add_argument
    add(
        "factory",
        metavar="MODULE:FACTORY",
        help="what makes the torch module when called without arguments: a function or a class, in "
        "package.module or ./file.py",
    )
    add(
        "--shape",
        type=shape,
        action="append",
        required=True,
        metavar="N,C,...",
        help="global shape of the input; once for each input",
    )
    add(
        "--layout",
        type=layout,
        metavar="DIMENSION=AXIS+AXIS,...",
        help="how the inputs are cut; by default every dimension over the axis of its name",
    )
    add(
        "--layouts",
        type=pattern_and_layout,
        action="append",
        default=[],
        metavar="PATTERN:DIMENSION=AXIS+AXIS,...",
        help="how modules whose names match take their inputs; once for each pattern",
    )
    add("--seed", type=int, default=0, help="of parameters and inputs (%(default)s)")
    add("--json", action="store_true", help="one line of JSON instead of a table")


def add_grid_option(parser: argparse.ArgumentParser) -> None:
    """Add `--grid`, which has to be given."""
    parser.add_argument(
        "--grid",
        type=grid_axes,
        required=True,
        metavar="AXIS=RANKS,...",
        help="ranks along the axes of the grid",
    )


def add_dtype_option(parser: argparse.ArgumentParser) -> None:
    """Add `--dtype`, of the inputs."""
    parser.add_argument("--dtype", choices=DTYPES, help="of the input (default: as the parameters)")
