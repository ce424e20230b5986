"""Workers: replicas that train models of their own, each on the ranks that share a sample."""

from __future__ import annotations

from typing import Any

from distconv.geometry.topology import AXES
from distconv.grid.process_grid import ProcessGrid

_WITHIN_A_SAMPLE = tuple(axis for axis in AXES if axis != "sample")
"""The grid axes that cut a sample."""


def worker_grid(grid: ProcessGrid) -> ProcessGrid:
    """Return the grid of this rank's replica alone: the ranks of `grid` that share its samples.

    All ranks of `grid` call it together. A model parallelized on it is trained by these ranks
    alone, on their own samples.
    """
    extents: dict[str, Any] = {axis: grid.shape[axis] for axis in _WITHIN_A_SAMPLE}
    peers = grid.topology.peers(grid.rank, _WITHIN_A_SAMPLE)
    ranks = [grid.ranks[peer] for peer in peers]
    return ProcessGrid(ranks, device=grid.device, **extents)
