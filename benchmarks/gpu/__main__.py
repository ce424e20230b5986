"""Write gpu-<name>.md: `python -m benchmarks.gpu benchmarks/results`, which `make gpu` calls.

On one rank the page begins anew. Then `graphs` after the folder adds steps as graphs, and two ranks
(`mpiexec -n 2` before it) add what needs two, or with `waits` only where the host waits. The exit
status tells whether all could be measured.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from mpi4py import MPI

from benchmarks.gpu import graphs
from benchmarks.gpu.alone import alone, formats, on_grid
from benchmarks.gpu.cases import (
    CONVOLUTIONS,
    COSMOFLOW_512,
    LAYERS,
    MESH_1K,
    MESH_1K_HALF,
    MESH_2K,
    NETWORKS,
    UNET,
    plain,
)
from benchmarks.gpu.messages import SIZES, TRANSPORTS, by_transport, messages, step
from benchmarks.gpu.needs import name_of
from benchmarks.gpu.page import Page, Part
from benchmarks.gpu.shards import PLANE, VOLUME, methods, shards
from benchmarks.gpu.waits import waits
from benchmarks.measuring.report import Row
from benchmarks.record import machine
from distconv import ProcessGrid
from distconv.device.kinds import accelerator, rehearsed

SECONDS = 1.5
"""Seconds that the rounds of a part, or of a cut, take about."""
BUDGET = {"1 rank": 110.0, "graphs": 70.0, "2 ranks": 30.0}
"""Seconds after which no part begins, by what is run; `make gpu` has a limit beyond."""

MESSAGES = "Messages between two processes"


def on_one_rank(grid: ProcessGrid) -> dict[str, list[Part]]:
    """Return all sections of one rank, the most important ones first."""
    of_layer = SECONDS / 3
    device = grid.device
    scalings = (MESH_1K, PLANE), (MESH_2K, PLANE), (UNET, VOLUME), (COSMOFLOW_512, VOLUME[3:4])
    return {
        "One rank": [
            *(Part(case.name, partial(alone, case, grid, SECONDS)) for case in NETWORKS),
            *(Part(case.name, partial(alone, case, grid, of_layer)) for case in LAYERS),
        ],
        "Channels last": [
            Part(case.name, partial(formats, case, grid, SECONDS)) for case in (MESH_1K_HALF, UNET)
        ],
        "Where the host waits": [Part("1 rank", partial(_waits, grid))],
        "Shards": [
            *(Part(c.name, partial(shards, c, cuts, device, SECONDS / 2)) for c, cuts in scalings),
            *(Part(c.name, partial(shards, c, PLANE, device, of_layer)) for c in LAYERS[:2]),
        ],
        "Overlapped or assembled": [
            Part(c.name, partial(methods, c, {"height": 4}, device, SECONDS / 6))
            for c in CONVOLUTIONS
        ],
    }


def as_graphs(grid: ProcessGrid) -> dict[str, list[Part]]:
    """Return the sections of steps that are captured as graphs."""
    scalings = (MESH_1K, PLANE[1:]), (MESH_2K, PLANE), (UNET, VOLUME[1:])
    return {
        "Steps as graphs": [
            Part(case.name, partial(graphs.whole, case, grid, SECONDS))
            for case in (MESH_1K, MESH_1K_HALF, UNET)
        ],
        "Shards as graphs": [
            Part(c.name, partial(graphs.shards, c, cuts, grid.device, SECONDS / 2))
            for c, cuts in scalings
        ],
    }


def _waits(grid: ProcessGrid) -> Iterator[str]:
    yield waits(f"{MESH_1K.name}, 1 rank", on_grid(MESH_1K, grid))
    yield waits(f"{MESH_1K.name}, plain torch", plain(MESH_1K, grid, grid.device))


def on_two_ranks(device: str | None) -> dict[str, list[Part]]:
    """Return the sections of two ranks; both ranks call it."""
    sections: dict[str, Callable[[ProcessGrid], Iterator[Row | str]]] = {
        MESSAGES: partial(messages, sizes=SIZES, seconds=SECONDS / 5),
        "Where the host waits on two ranks": partial(step, case=MESH_1K),
    }
    return {
        title: [Part(name, partial(by_transport, name, device, measure)) for name in TRANSPORTS]
        for title, measure in sections.items()
    }


def record(
    folder: Path, device: torch.device, sections: dict[str, list[Part]], what: str
) -> list[str]:
    """Write the results of all sections to the page, and return what has failed; all ranks call it.

    `what` is a key of `BUDGET`. The page begins anew on one rank; graphs and two ranks add to it.
    """
    name = name_of(device)
    path = folder / f"gpu-{re.sub('[^a-z0-9]+', '-', name.lower())}.md"
    page = Page(path, _head(name) if what == "1 rank" or not path.exists() else path.read_text())
    end = time.perf_counter() + BUDGET[what]
    for title, parts in sections.items():
        page.add(title, parts, end)
    return page.failures


def _head(name: str) -> str:
    precision = "TF32" if torch.backends.cudnn.allow_tf32 else "IEEE"
    runtime = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"HIP {torch.version.hip}"
    facts = f"GPU       {name}, {runtime}\nfloat32   {precision} in convolutions"
    note = "Written by `make gpu`; `benchmarks/README.md` explains the columns."
    return f"# Benchmarks on one GPU\n\n{note}\n\n```\n{machine()}\n{facts}\n```\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("folder", type=Path, help="that of the page")
    parser.add_argument("what", nargs="?", choices=["all", "graphs", "waits"], default="all")
    given = parser.parse_args(arguments)
    if accelerator() is None:
        print("benchmarks.gpu: torch sees no GPU", file=sys.stderr)
        return 1
    if MPI.COMM_WORLD.size == 1:
        grid = ProcessGrid()
        device, what = grid.device, "graphs" if given.what == "graphs" else "1 rank"
        sections = as_graphs(grid) if what == "graphs" else on_one_rank(grid)
    else:
        device, what, sections = torch.device(rehearsed()), "2 ranks", on_two_ranks(None)
        if given.what == "waits":
            sections.pop(MESSAGES)
    return 1 if record(given.folder, device, sections, what) else 0


if __name__ == "__main__":
    sys.exit(main())
