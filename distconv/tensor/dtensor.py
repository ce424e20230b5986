"""Conversion between torch's DTensor and DistTensor, in both directions.

torch cuts a dimension of n elements over p ranks into pieces of ceil(n / p) elements, the last of
which are smaller or empty. A canonical cut makes pieces that differ by one at most. If p divides n,
and in some other cases, both cuts are equal, and nothing is copied. Otherwise the dimension is made
whole, and each rank takes its piece of the other cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distconv.comm import replication
from distconv.geometry.layout import Cuts, Layout, block, rank_box, replicating_axes
from distconv.geometry.topology import Topology
from distconv.grid.device_mesh import mesh_axes
from distconv.grid.process_grid import ProcessGrid
from distconv.tensor.base import DistTensorBase
from distconv.tensor.redistribution import redistribute

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def to_dtensor(x: DistTensorBase) -> DTensor:
    """Return `x` as a DTensor on the device mesh of its grid. All ranks of the grid call it."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    grid = x.grid
    if not isinstance(grid, ProcessGrid):
        raise TypeError(f"to_dtensor: {grid!r} is rehearsed, and has no mesh of ranks")
    axes, topology = mesh_axes(grid), grid.topology
    placements = [
        next((Shard(d) for d, cut in enumerate(x.cuts) if axis in cut), Replicate())
        for axis in axes
    ]
    odd = _odd_dimensions(x.shape, x.cuts, axes, topology)
    kept = tuple(() if d in odd else cut for d, cut in enumerate(x.cuts))
    whole = redistribute(x, kept, "to_dtensor")
    # Along the axes of the odd dimensions each rank takes another piece, whose gradients are
    # summed.
    local = replication.unreplicate(whole.shard, grid, replicating_axes(x.cuts, topology))
    here = topology.coordinates(grid.rank)
    for d in odd:
        places = ((topology.extent(axis), here[axis]) for axis in axes if axis in x.cuts[d])
        start, stop = _chunk(x.shape[d], places)
        local = local.narrow(d, start, stop - start)
    stride = torch.empty(x.shape, device="meta").stride()
    result: Any = DTensor.from_local(
        local.contiguous(),
        grid.device_mesh,
        placements,
        run_check=False,
        shape=x.shape,
        stride=stride,
    )
    return result  # type: ignore[no-any-return]


def block_of_dtensor(d: DTensor, axes: Sequence[str], grid: ProcessGrid) -> tuple[Tensor, Layout]:
    """Return this rank's block of `d` as `grid` cuts it, and the layout. All ranks call it.

    `axes` names the grid axis of each dimension of the mesh.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    placements = [Replicate() if p.is_partial() else p for p in d.placements]
    if any(type(p) not in (Replicate, Shard) for p in placements):
        raise TypeError(
            f"from_dtensor: placements {d.placements}; redistribute it to Shard and Replicate"
        )
    dims = [p.dim % d.dim() if isinstance(p, Shard) else None for p in placements]
    cuts = tuple(
        tuple(axis for axis, dim in zip(axes, dims, strict=True) if dim == i)
        for i in range(d.dim())
    )
    odd = _odd_dimensions(d.shape, cuts, axes, grid.topology)
    whole = [Replicate() if dim in odd else p for p, dim in zip(placements, dims, strict=True)]
    if whole != list(d.placements):
        d = d.redistribute(placements=whole)
    # Ranks take different pieces of this tensor, so its gradient is the sum of theirs.
    parts = [Partial() if dim in odd else p for p, dim in zip(whole, dims, strict=True)]
    local = d.to_local(grad_placements=parts)
    box = rank_box(tuple(d.shape), cuts, grid.topology, grid.rank)
    for i in odd:
        local = local.narrow(i, box.start[i], box.stop[i] - box.start[i])
    return local, Layout.of(cuts)


def _odd_dimensions(
    shape: Sequence[int], cuts: Cuts, axes: Sequence[str], topology: Topology
) -> list[int]:
    """Return the dimensions whose pieces differ between torch's cut and the canonical one.

    `axes` names the grid axis of each dimension of torch's mesh.
    """
    odd = []
    for d, cut in enumerate(cuts):
        mine = [axis for axis in axes if axis in cut]
        extents = [topology.extent(axis) for axis in mine]
        parts = topology.parts(cut)
        for place in product(*map(range, extents)):
            there = dict.fromkeys(cut, 0) | dict(zip(mine, place, strict=True))
            ours = block(shape[d], parts, topology.part(there, cut))
            if _chunk(shape[d], zip(extents, place, strict=True)) != ours:
                odd.append(d)
                break
    return odd


def _chunk(size: int, places: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return start and stop of one rank's piece of a dimension, as torch cuts `size` elements.

    `places` has a pair for each mesh dimension that cuts the dimension: the number of pieces, and
    the number of this rank's piece.
    """
    start = 0
    for parts, index in places:
        longest = -(-size // parts)
        first = min(index * longest, size)
        start, size = start + first, min(longest, size - first)
    return start, start + size
