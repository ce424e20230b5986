"""Convolution, and transposed convolution, of tensors cut in samples, channels and space.

`channel_algorithms` divides channels and filters over the ranks. Each rank computes its part of the
outputs from its block of the input and halos of other ranks: assembled in one buffer, or overlapped
with their exchange. Partial sums over channels are added up over the ranks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from torch import Tensor

from distconv.device.numerics import FEWEST_IN_DOUBT
from distconv.device.thresholds import Thresholds, on_accelerator, thresholds
from distconv.geometry.halo.slabs import Boundary, LocalInput
from distconv.geometry.index_maps import Same
from distconv.geometry.layout import rank_box
from distconv.geometry.plan import Plan
from distconv.ops.conv.channel_algorithms import Layer, LayerPart, WeightMeta, algorithm, layer_part
from distconv.ops.conv.convolution import Convolution
from distconv.ops.conv.large_blocks import warn_of_large_block
from distconv.ops.conv.local_convolution import LocalConvolution
from distconv.ops.conv.overlapped import may_overlap, overlapped_convolution
from distconv.ops.support.method import chosen_method
from distconv.ops.support.operands import Placement, filled_block
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import gather_by, plan_to_gather
from distconv.tensor.sample_format import one_channel_in_sample_format


class _Plan(NamedTuple):
    """A rank's plan for computing its part of a convolution; cached by global metadata."""

    part: LayerPart
    inputs: Plan | None
    """The plan that gathers the part's inputs; None if every rank has its own."""
    local: LocalConvolution
    buffer: LocalInput
    """The arguments of the local operator on the gathered inputs."""
    boundary: Boundary | None
    """How to compute while halos travel; None if the inputs are gathered first."""
    made: tuple[int, ...]
    """The shape of the outputs of the local operator."""
    weighted: bool
    """Whether the global weight has elements; this rank's block of the weight may have none."""
    elements: int
    """The number of the rank's inputs or outputs, whichever is larger."""


def convolve(x: DistTensor, weight: Tensor, bias: Tensor | None, spec: Convolution) -> DistTensor:
    """Return a convolution of `x`. All ranks call it.

    Parameters
    ----------
    weight, bias: distributed, or plain and equal on all ranks.
    spec: torch's function and its other arguments.
    """
    meta = WeightMeta.of(weight, bias)
    sizes = thresholds(on_accelerator(x.shard, x.grid.computes_on_gpu))
    plan = _plan(spec, Placement.of(x), meta, algorithm(), chosen_method(), sizes)
    weight, bias, late = plan.part.operands(weight, bias)
    return plan.part.finish(_convolve_block(x, weight, bias, plan), late, x.grid)


def _convolve_block(x: DistTensor, weight: Tensor, bias: Tensor | None, plan: _Plan) -> Tensor:
    """Return the outputs of this rank's part; `weight` and `bias` are this rank's blocks."""
    part, operator = plan.part, plan.part.operator
    if plan.elements > FEWEST_IN_DOUBT:
        warn_of_large_block(x, plan.elements, operator)
    if plan.boundary is not None:
        return overlapped_convolution(x, weight, bias, plan.local, plan.boundary, operator)
    buffer = gather_by(plan.inputs, x, part.cuts, operator)
    buffer = one_channel_in_sample_format(buffer, x.shape, x.cuts, x.grid)
    if plan.weighted and not weight.numel():
        return part.empty_result(buffer, weight, bias)
    if 0 not in plan.made:
        return plan.local.recorded(plan.buffer, buffer, weight, bias)
    inputs = filled_block(buffer, (1, buffer.shape[1], *plan.buffer.shape[2:]))
    return plan.local.recorded(plan.buffer, inputs, weight, bias)[:0].reshape(plan.made)


@lru_cache(maxsize=4096)
def _plan(
    spec: Convolution,
    x: Placement,
    weights: WeightMeta,
    algorithm: str,
    method: str | None,
    sizes: Thresholds,
) -> _Plan:
    shape = spec.output_shape(x.shape, weights.shape, weights.bias)
    maps = spec.index_maps(weights.shape[2:])
    needs = (Same(), Same(), *spec.inputs_to_gather(maps, x.cuts))
    layer = Layer(spec.name, x, weights, shape, needs, algorithm, 1, spec.groups, spec.transposed)
    part = layer_part(layer)
    boundary, parts = None, tuple(map(x.topology.parts, x.cuts[2:]))
    overlaps = part.stays and may_overlap(
        x, method, spec.fewest_to_overlap(weights.shape, sizes) // part.blocks
    )
    if overlaps and spec.needs_halo(maps, x.shape[2:], parts):
        boundary = spec.boundary(x.topology, x.rank, *part.alone(x), maps)
    inputs = plan_to_gather(x.topology, x.rank, x.shape, x.cuts, part.needs, part.cuts)
    local = replace(spec.local, groups=part.groups)
    given, made = rank_box(x.shape, x.cuts, x.topology, x.rank).shape, part.box.shape
    elements = max(prod(given), prod(made))
    buffer, weighted = spec.buffer(maps, x, part.box), 0 not in weights.shape
    return _Plan(part, inputs, local, buffer, boundary, made, weighted, elements)
