"""F.grid_sample and F.affine_grid on partitioned planes: each rank receives the box it samples.

The box depends on the values of the points. The ranks all-gather the bounds of their boxes, which
are a few integers, and then exchange the boxes by one plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.comm.collectives import all_gather
from distconv.comm.ledger import Movement, record
from distconv.comm.transfer import gather
from distconv.device.kinds import thresholds
from distconv.geometry.index_maps import Interval
from distconv.geometry.layout import Box, Cuts, Layout, Shape, cutting_axes, rank_box
from distconv.geometry.requested import boxes_plan
from distconv.grid.interface import Grid
from distconv.ops.support.arguments import check_on_meta
from distconv.ops.support.merged import factors_of, is_merged, merge_as, unmerge, unmerged
from distconv.ops.support.operands import (
    as_distributed,
    box_on_rank,
    common_grid,
    empty_block,
    in_type,
    local_operand,
    may_read,
    to_accumulation_type,
    uncut,
)
from distconv.ops.warp.positions import Relocate, Sampling, extremes
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.opaque import opaque_call

NAME = "grid_sample"


@implements(F.grid_sample)
def grid_sample(
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> DistTensor:
    """Return values of the planes of `input`, (sample, channel, *plane), at the points of `grid`.

    The points are (sample, *outputs, coordinates). The output dimensions are partitioned as the
    plane's dimensions, or as the points' dimensions if the plane is not partitioned. A rank
    receives the box of the plane in which it samples; small planes are gathered. Collective.
    """
    options = mode, padding_mode, bool(align_corners)
    shape = check_on_meta(F.grid_sample, input, grid, *options)
    process_grid = common_grid(NAME, (input, grid))
    if is_merged(input):
        sampled = _by_samples(cast(DistTensor, input), grid, shape, options)
        if sampled is not None:
            return sampled
    x = as_distributed(input, process_grid)
    cuts = _result_cuts(x, grid)
    points = (cuts[0], *cuts[2:], ())
    own = local_operand(grid, tuple(grid.shape), points, x.grid, NAME)
    block = box_on_rank(shape, cuts, x.grid).shape
    if _gathers(x, padding_mode):
        plane = uncut(x, range(2, x.dim()), NAME).shard
        shard = _sampled(plane, own, block, options)
    else:
        about = tuple(x.shape), x.cuts, x.grid
        shard = opaque_call(partial(_sampled_in_box, about, block, options), x.shard, own)
    return DistTensor(shard, shape, cuts, x.grid)


def _sampled(plane: Tensor, own: Tensor, block: Shape, options: tuple[str, str, bool]) -> Tensor:
    """Return the values of `plane`, which this rank holds in full, at its points `own`.

    The result has the shape `block`. No communication.
    """
    if 0 in block:
        # The result depends on both operands in the graph, as on ranks that have elements.
        return empty_block(plane, block) + empty_block(own, block)
    return F.grid_sample(plane, own, *options)


def _sampled_in_box(
    about: tuple[Shape, Cuts, Grid],
    block: Shape,
    options: tuple[str, str, bool],
    shard: Tensor,
    own: Tensor,
) -> Tensor:
    """Return the values of partitioned planes at this rank's points. Collective.

    Parameters
    ----------
    about: the shape, cuts and grid of the planes, of which `shard` is this rank's block.
    block: the shape of the result.
    own: this rank's points.
    """
    x = DistTensor(shard, *about)
    plane_shape = tuple(x.shape[2:])
    accelerated = x.grid.computes_on_gpu
    sampling = Sampling(*options, x.dim() == 4 or accelerated, accelerated)
    box = extremes(sampling, own.detach(), plane_shape)
    plane = _boxes(x, box)
    if 0 in block or all(pair == (0, n) for pair, n in zip(box, plane_shape, strict=True)):
        return _sampled(plane, own, block, options)
    moved = Relocate.apply(own, sampling, plane_shape, box)
    wide, padding = to_accumulation_type(plane), sampling.padding_in_box
    return in_type(F.grid_sample(wide, moved, options[0], padding, options[2]), plane.dtype)


def _by_samples(
    input: DistTensor, points: Tensor, shape: Shape, options: tuple[str, str, bool]
) -> DistTensor | None:
    """Return the values of planes of which only the samples are merged and partitioned. Collective.

    Each rank samples its own planes. Points with another partition are redistributed. Returns None
    for other planes.
    """
    x, runs = unmerged(input), factors_of(input)
    lead = len(runs[0])
    if any(len(run) > 1 for run in runs[1:]) or any(x.cuts[lead:]):
        return None
    cuts, made = (*x.cuts[:lead], *((),) * len(shape[1:])), (*runs[0], *shape[1:])
    apart = unmerge(points, (runs[0], *((n,) for n in points.shape[1:])))
    own = local_operand(apart, tuple(apart.shape), cuts, x.grid, NAME).flatten(0, lead - 1)
    plane, block = x.shard.flatten(0, lead - 1), box_on_rank(made, cuts, x.grid).shape
    shard = _sampled(plane, own, block, options).reshape(block)
    return cast(DistTensor, merge_as(DistTensor(shard, made, cuts, x.grid), shape))


def _result_cuts(x: DistTensor, points: Tensor) -> Cuts:
    """Return the grid axes that partition each dimension of the values of `x` at `points`."""
    if any(x.cuts[2:]) or not isinstance(points, DistTensor):
        return x.cuts
    used = cutting_axes(x.cuts)
    free = [() if set(axes) & set(used) else axes for axes in points.cuts[1:-1]]
    return (*x.cuts[:2], *free)


def _gathers(x: DistTensor, padding_mode: str) -> bool:
    """Return whether every rank gathers the planes of `x`. The result is equal on all ranks.

    Planes are gathered if they are small or not partitioned, or if the points cannot be read. On
    CPUs, kernels of half types round all intermediate results. A computation in a box cannot repeat
    this rounding for reflected positions, and for planes too large for the type to represent all
    pixel numbers.
    """
    if not any(x.cuts[2:]) or 0 in x.shape or not may_read(x, in_replays=True):
        return True
    accelerated = x.grid.computes_on_gpu
    # The first rank holds the most samples and channels.
    most = rank_box(tuple(x.shape), x.cuts, x.grid.topology, 0).shape[:2]
    gathered = prod(most) * prod(x.shape[2:])
    if gathered <= thresholds(accelerated).gathered_plane:
        return True
    if accelerated or x.shard.element_size() >= 4:
        return False
    integers = 2 / torch.finfo(x.dtype).eps
    return padding_mode == "reflection" or max(x.shape[2:]) > integers


def _boxes(x: DistTensor, own: Sequence[Interval]) -> Tensor:
    """Return the box of the planes of `x` that this rank needs for its samples. Collective.

    The box has all of this rank's samples and channels. `own` has the interval of pixels for each
    dimension of the plane, and may differ between ranks. The result can be differentiated.
    """
    grid, axes = x.grid, cutting_axes(x.cuts[2:])
    bounds = torch.tensor(own, dtype=torch.int64, device=x.shard.device)
    start, stop = x.box.start[:2], x.box.stop[:2]
    boxes = tuple(
        Box((*start, *(a for a, _ in asked)), (*stop, *(b for _, b in asked)))
        for asked in all_gather(bounds, grid, axes).tolist()
    )
    ranks = grid.topology.peers(grid.rank, axes)
    plan = boxes_plan(grid.topology, grid.rank, tuple(x.shape), x.cuts, ranks, boxes)
    whole = (*x.cuts[:2], *((),) * len(own))
    record(Movement(NAME, x.grid_layout, Layout.of(whole), plan, x.shard.element_size()))
    return gather(x.shard, plan, grid)


@implements(F.affine_grid)
def affine_grid(
    theta: DistTensor, size: Sequence[int], align_corners: bool | None = None
) -> DistTensor:
    """Return the points, (sample, *plane, coordinates), of a regular grid under the maps `theta`.

    The samples are partitioned as in `theta`. Each dimension of the plane is partitioned over the
    axis of the process grid with its name, as an image is by default. Only `theta` is
    redistributed.
    """
    shape = check_on_meta(F.affine_grid, theta, tuple(size), bool(align_corners))
    maps = uncut(theta, (1, 2), "affine_grid")
    names = ("depth", "height", "width")[-(len(shape) - 2) :]
    topology, used = theta.grid.topology, cutting_axes(maps.cuts)
    plane = [(a,) if topology.extent(a) > 1 and a not in used else () for a in names]
    cuts = (maps.cuts[0], *plane, ())
    box = box_on_rank(shape, cuts, theta.grid)
    if 0 in box.shape:
        return DistTensor(empty_block(maps.shard, box.shape), shape, cuts, theta.grid)
    spans = zip(shape[1:-1], box.start[1:-1], box.stop[1:-1], strict=True)
    own = [_coordinates(n, bool(align_corners), maps.shard)[a:b] for n, a, b in spans]
    pixels = torch.stack(torch.meshgrid(*own, indexing="ij")[::-1], -1)
    base = F.pad(pixels, (0, 1), value=1.0).flatten(0, -2)
    shard = (base @ maps.shard.mT).view(box.shape)
    return DistTensor(shard, shape, cuts, theta.grid)


def _coordinates(size: int, align_corners: bool, like: Tensor) -> Tensor:
    """Return the coordinates, from -1 to 1, of the `size` pixels along a dimension of the plane.

    The result has the type and device of `like`.
    """
    if size == 1:
        return like.new_zeros(1)
    along = torch.linspace(-1, 1, size, dtype=like.dtype, device=like.device)
    return along if align_corners else along * (size - 1) / size
