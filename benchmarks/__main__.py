"""`python -m benchmarks NAME`: one benchmark, on as many ranks as have been started."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.channels import channels
from benchmarks.halo import halos
from benchmarks.layer import layers
from benchmarks.networks import MESH, NETWORKS, UNET3D
from benchmarks.overhead import overheads
from benchmarks.step import steps
from distconv.tools.arguments import BadArguments, RankParser
from distconv.tools.bench.memory import memory
from distconv.tools.bench.report import Row
from distconv.tools.bench.settings import Settings
from distconv.tools.commands.bench import run_options, settings_of, show

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
    parser.add_argument("benchmark", choices=BENCHMARKS, help="what is measured")
    run_options(parser)
    given = parser.parse_args(arguments)
    try:
        settings = settings_of(given)
        if given.benchmark == "halo" and settings.ranks == 1:
            raise BadArguments("one rank has no halos; start it with mpiexec -n 2 or more")
        show(BENCHMARKS[given.benchmark](settings), given)
    except BadArguments as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
