"""Values of a plane or volume between its elements, at points given by a tensor.

The points may lie anywhere, so the plane is made whole on every rank first. The result is cut as
the plane was, and each rank computes the values at its own points.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from distconv.ops.support.metadata_checks import check_on_meta
from distconv.ops.support.operands import (
    as_distributed,
    box_on_rank,
    common_grid,
    empty_block,
    filled_block,
    local_operand,
    uncut,
)
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor


@implements(F.grid_sample)
def grid_sample(
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> DistTensor:
    """Return the values of (sample, channel, *plane) at the points (sample, *outputs, coordinates).

    Samples and channels stay cut; the plane is gathered. The first output dimensions are cut as the
    plane's dimensions are.
    """
    options = mode, padding_mode, bool(align_corners)
    shape = check_on_meta(F.grid_sample, input, grid, *options)
    x = as_distributed(input, common_grid("grid_sample", (input, grid)))
    cuts = x.cuts
    points = (cuts[0], *cuts[2:], ())
    own = local_operand(grid, tuple(grid.shape), points, x.grid, "grid_sample")
    plane = uncut(x, range(2, x.dim()), "grid_sample").shard
    block = box_on_rank(shape, cuts, x.grid).shape
    if 0 in block:
        # Depends on both operands in the graph, as on the ranks that have elements.
        shard = empty_block(plane, block) + empty_block(own, block)
    else:
        shard = F.grid_sample(plane, own, *options)
    return DistTensor(shard, shape, cuts, x.grid)


@implements(F.affine_grid)
def affine_grid(
    theta: DistTensor, size: Sequence[int], align_corners: bool | None = None
) -> DistTensor:
    """Return the points (sample, *plane, coordinates) of a regular grid under affine maps.

    The samples are cut as in `theta`; other dimensions are whole on every rank.
    """
    shape = check_on_meta(F.affine_grid, theta, tuple(size), bool(align_corners))
    maps = uncut(theta, (1, 2), "affine_grid")
    own = maps.shard.shape[0]
    block = maps.shard if own else filled_block(maps.shard, (1, *maps.shape[1:]))
    shard = F.affine_grid(block, [block.shape[0], *size[1:]], bool(align_corners))[:own]
    return DistTensor(shard, shape, (maps.cuts[0], *((),) * (len(shape) - 1)), theta.grid)
