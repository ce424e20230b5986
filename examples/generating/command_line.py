"""The command line of generators, which every rank parses; errors are one line."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import distconv as dc
from distconv.grid.ranks import world
from distconv.transport.interface import ObjectCommunicator
from examples.trainer.arguments import (
    Add,
    add_grid,
    command_line,
    errors_in_one_line,
    natural,
    positive,
)
from examples.trainer.building import make_grid
from examples.trainer.progress import on_terminal

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
    parser, add = command_line(f"{name}.generate", description, comm)
    add("--samples", "number of samples", type=positive(int), default=64)
    add_own(add)
    add("--seed", "sample i follows from it and from i alone", type=natural, default=0)
    add("--output", "where to write", type=Path, required=True)
    add_grid(add, axes, "sample=-1")
    args = parser.parse_args(arguments)
    shown = comm.rank == 0
    counted = shown and on_terminal()

    def show(done: int) -> None:
        if counted:
            print(f"\r{done}/{args.samples} samples", end="", file=sys.stderr, flush=True)

    start = time.perf_counter()
    with errors_in_one_line(comm):
        # Generators compute on the host, also beside GPUs.
        said = generate(args, make_grid(args, comm, device="cpu"), show)
    if counted:
        print(file=sys.stderr)
    if shown:
        print(f"{args.output}: {said}; {time.perf_counter() - start:.1f} s", flush=True)
