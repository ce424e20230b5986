"""`python -m benchmarks NAME`: one benchmark, on as many ranks as have been started."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.channels import channels
from benchmarks.halo import halos
from benchmarks.layer import layers
from benchmarks.measuring.memory import memory
from benchmarks.measuring.network import named_network
from benchmarks.measuring.own_step import own_step
from benchmarks.measuring.report import Row
from benchmarks.measuring.settings import Settings
from benchmarks.networks import MESH, NETWORKS, UNET3D
from benchmarks.options import run_options, settings_of, show
from benchmarks.overhead import overheads
from benchmarks.step import steps
from distconv.tools.arguments import BadArguments, RankParser, shape

BENCHMARKS: dict[str, Callable[[Settings], Iterator[Row]]] = {
    "layer": layers,
    "channels": channels,
    "halo": halos,
    "step": steps,
    "memory": lambda settings: memory(settings, (MESH, UNET3D, NETWORKS[2], NETWORKS[-1])),
    "overhead": overheads,
}
"""The benchmarks by name; all ranks call one."""


def main(arguments: list[str] | None = None) -> None:
    """Run a benchmark, and print its rows on rank 0; all ranks call it."""
    parser = RankParser(prog="python -m benchmarks", description=__doc__)
    benchmarks = parser.add_subparsers(dest="benchmark", required=True)
    for name in BENCHMARKS:
        run_options(benchmarks.add_parser(name))
    own = benchmarks.add_parser("own", help="a training step of a network of your own")
    own.add_argument(
        "factory", metavar="MODULE:FACTORY", help="as package.module:Net or ./file.py:Net"
    )
    own.add_argument("shape", type=shape, metavar="N,C,...", help="of the input, as a whole")
    run_options(own)
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


if __name__ == "__main__":
    main()
