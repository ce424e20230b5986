"""`python -m benchmarks NAME`: one benchmark, on as many ranks as have been started."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

import torch

from benchmarks.attention import attentions
from benchmarks.channels import channels
from benchmarks.families import families
from benchmarks.halo import halos
from benchmarks.layer import layers
from benchmarks.lookups import graphs, warps
from benchmarks.measuring.memory import memory
from benchmarks.measuring.network import named_network
from benchmarks.measuring.own_step import own_step, step_rows
from benchmarks.measuring.report import Row, as_table, plot
from benchmarks.measuring.settings import Settings
from benchmarks.modes import modes
from benchmarks.networks import MESH, NETWORKS, UNET3D
from benchmarks.overhead import overheads
from benchmarks.small_steps import small_steps
from distconv.grid.process_grid import ProcessGrid
from distconv.grid.ranks import world
from distconv.tools.command_line import BadArguments, RankParser, StatusLine, grid_axes, shape
from distconv.transport.torch import TorchCommunicator

BENCHMARKS: dict[str, Callable[[Settings], Iterator[Row]]] = {
    "layer": layers,
    "channels": channels,
    "halo": halos,
    "step": lambda settings: chain.from_iterable(
        step_rows("step", network, settings) for network in NETWORKS
    ),
    "memory": lambda settings: memory(settings, (MESH, UNET3D, NETWORKS[2], NETWORKS[-1])),
    "overhead": overheads,
    "attention": attentions,
    "warp": warps,
    "graph": graphs,
    "modes": modes,
    "small": small_steps,
    "families": families,
}
"""The benchmarks by name; all ranks call one."""


def main(arguments: list[str] | None = None) -> None:
    """Run a benchmark, and print its rows on rank 0; all ranks call it."""
    options = RankParser(add_help=False)
    options.add_argument(
        "--grid",
        type=grid_axes,
        metavar="AXIS=RANKS,...",
        help="by default all ranks along the first spatial dimension",
    )
    options.add_argument("--threads", type=int, default=1, help="of every rank (%(default)s)")
    options.add_argument(
        "--seconds", type=float, default=5.0, help="about how long a case takes (%(default)s)"
    )
    options.add_argument("--json", action="store_true", help="one line of JSON for every row")
    options.add_argument("--plot", type=Path, metavar="FILE", help="draw the rows")
    parser = RankParser(prog="python -m benchmarks", description=__doc__)
    benchmarks = parser.add_subparsers(dest="benchmark", required=True)
    for name in BENCHMARKS:
        benchmarks.add_parser(name, parents=[options])
    own = benchmarks.add_parser(
        "own", parents=[options], help="a training step of a network of your own"
    )
    own.add_argument(
        "factory", metavar="MODULE:FACTORY", help="as package.module:Net or ./file.py:Net"
    )
    own.add_argument("shape", type=shape, metavar="N,C,...", help="of the input, as a whole")
    given = parser.parse_args(arguments)
    try:
        settings = settings_of(given)
        if given.benchmark == "halo" and settings.ranks == 1:
            raise BadArguments("one rank has no halos; start it with mpiexec -n 2 or more")
        if given.benchmark == "own":
            rows = own_step(settings, named_network(given.factory, given.shape, settings))
        else:
            rows = BENCHMARKS[given.benchmark](settings)
        show(rows, given)
    except BadArguments as error:
        parser.error(str(error))


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the settings that the options choose; all ranks call it.

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


if __name__ == "__main__":
    main()
