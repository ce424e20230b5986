"""How benchmarks are run: on which grid, with how many threads, for how long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from distconv.grid.process_grid import ProcessGrid
from distconv.grid.ranks import world


class Settings(NamedTuple):
    """The choices of the command line for all benchmarks."""

    extents: Mapping[str, Any] | None = None
    """Ranks along the axes of the grid; all along the first spatial dimension when not given."""
    threads: int = 1
    """Threads of every rank; serial torch has as many as all ranks together."""
    seconds: float = 5.0
    """About how long one case takes."""

    def grid(self, ndim: int) -> ProcessGrid:
        """Return the grid for tensors of `ndim` dimensions; all ranks call it."""
        first = {3: "width", 4: "height", 5: "depth"}[ndim]
        return chain(first) if self.extents is None else ProcessGrid(**self.extents, device="cpu")

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return world().size

    def configuration(self, grid: ProcessGrid, *more: str) -> str:
        """Return grid, threads and `more`, as a row names its case."""
        axes = [f"{axis}={n}" for axis, n in grid.shape.items() if n > 1] or ["1 rank"]
        return ", ".join([*axes, f"{self.threads} thread{'s' * (self.threads > 1)} a rank", *more])


def chain(axis: str) -> ProcessGrid:
    """Return the grid of all ranks along one axis; all ranks call it."""
    extents: dict[str, Any] = {axis: -1}
    return ProcessGrid(**extents, device="cpu")


def by(sizes: Sequence[int]) -> str:
    """Return a shape with crosses between its sizes."""
    return "x".join(map(str, sizes))
