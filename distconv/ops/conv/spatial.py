"""Convolution, and transposed convolution, where every rank has all channels and filters.

Each rank computes its own block of the output from its block of the input and halos of other
ranks: assembled in one buffer, or overlapped with their exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from distconv.device.numerics import FEWEST_IN_DOUBT
from distconv.geometry.halo.slabs import Boundary, LocalInput
from distconv.geometry.index_maps import IndexMap, Same
from distconv.geometry.layout import Box, Cuts, Shape, rank_box
from distconv.geometry.plan import Plan
from distconv.ops.conv.large_blocks import warn_of_large_block
from distconv.ops.conv.local_convolution import LocalConvolution
from distconv.ops.conv.overlapped import may_overlap, overlapped_convolution
from distconv.ops.conv.specification import ConvolutionSpec
from distconv.ops.support.method import chosen_method
from distconv.ops.support.operands import Placement, filled_block
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import gather_by, plan_to_gather


class SpatialPlan(NamedTuple):
    """A rank's plan for computing its block of a convolution; cached by global metadata.

    Attributes
    ----------
    shape: the global shape of the output.
    block: the shape of this rank's outputs.
    cuts: the cuts of the gathered inputs.
    inputs: the plan that gathers the inputs of the block; None if every rank has its own.
    local: the local operator.
    buffer: the arguments of the local operator on the gathered inputs.
    boundary: how to compute while halos travel; None if the inputs are gathered first.
    elements: the number of the rank's inputs or outputs, whichever is larger.
    """

    shape: Shape
    block: Shape
    cuts: Cuts
    inputs: Plan | None
    local: LocalConvolution
    buffer: LocalInput
    boundary: Boundary | None
    elements: int


def convolve_whole_channels(
    x: DistTensor, weight: Tensor, bias: Tensor | None, spec: ConvolutionSpec
) -> DistTensor:
    """Return the convolution of an input cut in samples and space. All ranks call it.

    Parameters
    ----------
    weight, bias: plain tensors, equal on all ranks.
    """
    bias_shape = None if bias is None else tuple(bias.shape)
    plan = _plan(spec, Placement.of(x), tuple(weight.shape), bias_shape, chosen_method())
    return DistTensor(convolve_block(x, weight, bias, plan, spec.name), plan.shape, x.cuts, x.grid)


def convolve_block(
    x: DistTensor, weight: Tensor, bias: Tensor | None, plan: SpatialPlan, operator: str
) -> Tensor:
    """Return this rank's block of outputs by `plan`. All ranks call it.

    Parameters
    ----------
    weight, bias: this rank's blocks of the layer's parameters.
    operator: the name under which movements are recorded.
    """
    if plan.elements > FEWEST_IN_DOUBT:
        warn_of_large_block(x, plan.elements, operator)
    if plan.boundary is not None:
        return overlapped_convolution(x, weight, bias, plan.local, plan.boundary, operator)
    buffer = gather_by(plan.inputs, x, plan.cuts, operator)
    if prod(plan.block):
        return plan.local.recorded(plan.buffer, buffer, weight, bias)
    inputs = filled_block(buffer, (1, buffer.shape[1], *plan.buffer.shape[2:]))
    return plan.local.recorded(plan.buffer, inputs, weight, bias)[:0].reshape(plan.block)


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
    return spatial_plan(spec, x, maps, shape, needs, x.cuts, box, boundary)


def spatial_plan(
    spec: ConvolutionSpec,
    x: Placement,
    maps: tuple[Any, ...],
    shape: Shape,
    needs: Sequence[IndexMap],
    cuts: Cuts,
    box: Box,
    boundary: Boundary | None,
) -> SpatialPlan:
    """Return a rank's plan to compute the outputs in `box` of a convolution.

    Parameters
    ----------
    maps: the index map of each spatial dimension.
    shape: the global shape of the output.
    needs, cuts: the index maps and cuts of the gathered inputs.
    boundary: how to compute while halos travel; None to gather the inputs first.
    """
    inputs = plan_to_gather(x.topology, x.rank, x.shape, x.cuts, needs, cuts)
    buffer = spec.buffer(maps, x, box)
    given = rank_box(x.shape, x.cuts, x.topology, x.rank).shape
    elements = max(prod(given), prod(box.shape))
    return SpatialPlan(shape, box.shape, cuts, inputs, spec.local, buffer, boundary, elements)


def boundary_of(
    spec: ConvolutionSpec,
    x: Placement,
    maps: tuple[Any, ...],
    shape: Shape,
    made: Shape,
    cuts: Cuts,
) -> Boundary | None:
    """Return a rank's boundary for computing while halos travel.

    Returns None, on all ranks, if no rank needs halos or if the blocks of inputs and outputs do not
    line up.

    Parameters
    ----------
    shape, made: the shapes of input and output, with this rank's channels.
    cuts: the cuts of both.
    """
    if not spec.needs_halo(maps, x.shape[2:], tuple(map(x.topology.parts, x.cuts[2:]))):
        return None
    return spec.boundary(x.topology, x.rank, shape, made, cuts, maps)
