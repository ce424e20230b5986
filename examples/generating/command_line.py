"""The command line of generators, which every rank parses; errors are one line."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import distconv as dc
from distconv.data import DataError
from distconv.tools.arguments import RankParser, grid_axes
from distconv.transport.interface import ObjectCommunicator
from distconv.transport.world import world
from examples.trainer.arguments import Add, natural, positive

Progress = Callable[[int], None]
"""A function that is called with the number of finished samples."""


def run(
    name: str,
    description: str,
    axes: Sequence[str],
    add_own: Callable[[Add], None],
    generate: Callable[[argparse.Namespace, dc.ProcessGrid, Progress], str],
    arguments: Sequence[str] | None = None,
    comm: ObjectCommunicator | None = None,
) -> None:
    """Generate samples on the ranks of `comm`; errors are one line, with exit status 2.

    Args:
        name: the folder of the example.
        description: the beginning of `--help`.
        axes: the axes that `--grid` may name.
        add_own: adds the options of the example.
        generate: makes the samples, on all ranks together, and returns a message about them.
        arguments: the command line; the program's own when not given.
        comm: the ranks; all of the job when not given.
    """
    if comm is None:
        comm = world().for_program()
    parser = RankParser(
        comm,
        prog=f"python -m examples.{name}.generate",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def add(option: str, text: str, **keywords: Any) -> None:
        if keywords.get("default") is not None:
            text += " (default %(default)s)"
        parser.add_argument(option, help=text, **keywords)

    add("--samples", "number of samples", type=positive(int), default=64)
    add_own(add)
    add("--seed", "sample i follows from it and from i alone", type=natural, default=0)
    add("--output", "where to write", type=Path, required=True)
    add(
        "--grid",
        "ranks along the axes of the process grid; one may be -1, for all that remain",
        type=partial(grid_axes, axes=axes),
        default="sample=-1",
        metavar="AXIS=RANKS,...",
    )
    args = parser.parse_args(arguments)
    shown = comm.rank == 0

    def show(done: int) -> None:
        if shown:
            print(f"\r{done}/{args.samples} samples", end="", file=sys.stderr, flush=True)

    start = time.perf_counter()
    try:
        try:
            # Generators compute on the host, also beside GPUs.
            grid = dc.ProcessGrid(comm, device="cpu", **args.grid)
        except ValueError as error:
            raise DataError(str(error)) from error
        said = generate(args, grid, show)
    except DataError as error:
        if shown:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if shown:
        print(file=sys.stderr)
        print(f"{args.output}: {said}; {time.perf_counter() - start:.1f} s", flush=True)
