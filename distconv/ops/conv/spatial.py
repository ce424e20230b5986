"""Convolution, and transposed convolution, where every rank has all channels and filters.

Each rank computes its own block of the output, from its block of the input and the halos that it
lacks: `assembled` in one buffer, or overlapped with their exchange.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from distconv.geometry.halo.slabs import Boundary, LocalInput
from distconv.geometry.index_maps import IndexMap, Same
from distconv.geometry.layout import Box, Cuts, Shape, rank_box
from distconv.ops.conv.kernels import recorded_convolution
from distconv.ops.conv.planes import KERNELS, takes_channels_last, with_channels_last
from distconv.ops.conv.specification import ConvolutionSpec
from distconv.ops.support.method import chosen_method
from distconv.ops.support.operands import Placement
from distconv.ops.windowed.overlapped import may_overlap, overlapped_linear
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import gather_inputs


class SpatialPlan(NamedTuple):
    """How a rank computes a block of outputs; remembered, as global metadata decide it.

    Attributes
    ----------
    spec: the convolution, with the groups that the rank computes.
    shape: the global shape of the output.
    maps: from outputs to inputs, for each spatial dimension.
    needs, cuts: what an assembled computation gathers of the input.
    box: the outputs that the rank computes.
    boundary: how to compute while halos travel; None where the input is assembled.
    by_torch: whether torch's function computes them from the rank's own block as it is.
    own: how the local operator does that for planes; None where it cannot.
    """

    spec: ConvolutionSpec
    shape: Shape
    maps: tuple[Any, ...]
    needs: tuple[IndexMap, ...]
    cuts: Cuts
    box: Box
    boundary: Boundary | None
    by_torch: bool = False
    own: LocalInput | None = None


def convolve_whole_channels(
    x: DistTensor, weight: Tensor, bias: Tensor | None, spec: ConvolutionSpec
) -> DistTensor:
    """Return the convolution of an input cut in samples and space; all ranks call it.

    Parameters
    ----------
    weight, bias: plain tensors, equal on all ranks.
    """
    bias_shape = None if bias is None else tuple(bias.shape)
    plan = _plan(spec, Placement.of(x), tuple(weight.shape), bias_shape, chosen_method())
    block = convolve_block(x, weight, bias, plan, spec.name)
    return DistTensor(block, plan.shape, x.cuts, x.grid)


@lru_cache(maxsize=4096)
def _plan(
    spec: ConvolutionSpec, x: Placement, weight: Shape, bias: Shape | None, method: str | None
) -> SpatialPlan:
    shape = spec.output_shape(x.shape, weight, bias)
    maps = spec.index_maps(weight[2:])
    boundary = None
    if may_overlap(x, method, spec.fewest_to_overlap(weight)):
        boundary = boundary_of(spec, x, maps, x.shape, shape, x.cuts)
    needs = (Same(), Same(), *spec.inputs_to_gather(maps, x.cuts))
    box = rank_box(shape, x.cuts, x.topology, x.rank)
    # For volumes there are other kernels than torch's, and torch refuses planes without outputs.
    by_torch = len(maps) < 3 and prod(box.shape) > 0 and all(isinstance(n, Same) for n in needs)
    own = None
    if by_torch and len(maps) == 2 and spec.needs_halo(maps, x.shape[2:], _parts(x)) is not None:
        own = spec.boundary(x.topology, x.rank, x.shape, shape, x.cuts, maps).own
    return SpatialPlan(spec, shape, maps, needs, x.cuts, box, boundary, by_torch, own)


def boundary_of(
    spec: ConvolutionSpec,
    x: Placement,
    maps: tuple[Any, ...],
    shape: Shape,
    made: Shape,
    cuts: Cuts,
) -> Boundary | None:
    """Return the boundary of a rank's block; None where inputs and outputs do not line up.

    Parameters
    ----------
    shape, made, cuts: of input and output, as far as the rank's local operator sees them.
    """
    if not spec.needs_halo(maps, x.shape[2:], _parts(x)):
        return None
    return spec.boundary(x.topology, x.rank, shape, made, cuts, maps)


def _parts(x: Placement) -> tuple[int, ...]:
    """Return into how many parts each spatial dimension is cut."""
    return tuple(map(x.topology.parts, x.cuts[2:]))


def convolve_block(
    x: DistTensor, weight: Tensor, bias: Tensor | None, plan: SpatialPlan, operator: str
) -> Tensor:
    """Return the block of outputs that `plan` has this rank compute; all ranks call it.

    Parameters
    ----------
    weight, bias: what the rank holds of them.
    operator: the name under which movements are recorded.
    """
    spec, local = plan.spec, plan.spec.local
    if takes_channels_last(x, weight.shape, spec.groups):
        local = spec.local_of_sample
        if plan.own is not None:
            arguments = local.arguments(plan.own)
            return recorded_convolution(KERNELS, x.shard, weight, bias, *arguments)
    if plan.by_torch:
        return spec.function(x.shard, weight, bias, *spec.arguments)
    if plan.boundary is not None:
        return overlapped_linear(x, (x.shard, weight, bias), local, plan.boundary, operator)
    buffer = gather_inputs(x, plan.needs, plan.cuts, operator)
    if local.channels_last:
        buffer = with_channels_last(buffer)
    return spec.assembled(buffer, weight, bias, x, plan.maps, plan.box)
