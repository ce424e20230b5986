"""The grids on which examples are trained, and the words for them on a command line."""

from __future__ import annotations

from mpi4py import MPI

import distconv as dc

GRIDS = {
    1: [{}],
    2: [{"depth": 2}, {"sample": 2}],
    4: [{"depth": 2, "height": 2}, {"sample": 2, "width": 2}],
}
"""For each number of ranks."""


def alone() -> dc.ProcessGrid:
    """Return a grid of this rank alone."""
    return dc.ProcessGrid((MPI.COMM_WORLD.rank,))


def axes(grid: dict[str, int]) -> str:
    """Return a grid as `--grid` takes it."""
    return ",".join(f"{axis}={ranks}" for axis, ranks in grid.items()) or "sample=1"
