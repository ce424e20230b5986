"""The options of every benchmark, and how their rows are shown."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import torch

from benchmarks.measuring.report import Row, as_table, plot
from benchmarks.measuring.settings import Settings
from distconv.grid.process_grid import ProcessGrid
from distconv.tools.arguments import BadArguments, grid_axes
from distconv.tools.progress import StatusLine
from distconv.transport.torch_groups import TorchCommunicator
from distconv.transport.world import world


def run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of everything that is measured."""
    add = parser.add_argument
    add(
        "--grid",
        type=grid_axes,
        metavar="AXIS=RANKS,...",
        help="by default all ranks along the first spatial dimension",
    )
    add("--threads", type=int, default=1, help="of every rank (%(default)s)")
    add("--seconds", type=float, default=5.0, help="about how long a case takes (%(default)s)")
    add("--json", action="store_true", help="one line of JSON for every row")
    add("--plot", type=picture, metavar="FILE", help="draw the rows into a picture")


def picture(text: str) -> Path:
    """Return the file of a picture, of an ending that matplotlib writes; PNG without any."""
    path, known = Path(text), ("png", "pdf", "svg", "eps", "jpg", "jpeg", "webp", "tif", "tiff")
    if path.suffix and path.suffix[1:].lower() not in known:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no picture; end it in .{' or .'.join(known)}"
        )
    return path


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the settings that these options choose; all ranks call it.

    Raises
    ------
    BadArguments
        On every rank, where the grid does not fit the ranks, or MPI has not started them.
    """
    if isinstance(world(), TorchCommunicator):
        raise BadArguments("MPI has not started the ranks; start them with mpiexec -n 2 or more")
    if arguments.grid is not None:
        try:
            ProcessGrid(**arguments.grid, device="cpu")
        except ValueError as error:
            raise BadArguments(f"--grid: {error}") from None
    torch.set_num_threads(arguments.threads)
    return Settings(arguments.grid, arguments.threads, arguments.seconds)


def show(rows: Iterable[Row], arguments: argparse.Namespace) -> None:
    """Take the rows as they come, and print and draw them on rank 0; all ranks call it."""
    first, found = world().rank == 0, []
    with StatusLine(first) as say:
        for row in rows:
            found.append(row)
            say(f"{len(found)}: {row.case}, {row.measure}")
            if first and arguments.json:
                print(row.json(), flush=True)
    if first:
        if not arguments.json:
            print(as_table(found))
        if arguments.plot is not None:
            plot(found, arguments.plot)
