"""Convolution, and transposed convolution, with channels or filters cut over ranks.

`channel_algorithms` decides how the layer is divided. Each rank's part is then computed as in
`spatial`, and partial sums over channels are added up over ranks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from distconv.geometry.index_maps import Same
from distconv.ops.conv.channel_algorithms import Layer, LayerPart, WeightMeta, algorithm, layer_part
from distconv.ops.conv.overlapped import may_overlap
from distconv.ops.conv.spatial import (
    SpatialPlan,
    boundary_of,
    convolve_block,
    spatial_plan,
)
from distconv.ops.conv.specification import ConvolutionSpec
from distconv.ops.support.method import chosen_method
from distconv.ops.support.operands import Placement
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import gather_by


def convolve_cut_channels(
    x: DistTensor, weight: Tensor, bias: Tensor | None, spec: ConvolutionSpec
) -> DistTensor:
    """Return a convolution whose input or weight is cut in channels or filters. All ranks call it.

    Parameters
    ----------
    weight, bias: distributed, or plain and equal on all ranks.
    """
    meta = WeightMeta.of(weight, bias)
    part, plan = _plan(spec, Placement.of(x), meta, algorithm(), chosen_method())
    weight, bias, late = part.operands(weight, bias)
    if plan.boundary is None and not weight.numel():
        buffer = gather_by(plan.inputs, x, plan.cuts, part.operator)
        return part.finish(part.empty_result(buffer, weight, bias), late, x.grid)
    block = convolve_block(x, weight, bias, plan, part.operator)
    return part.finish(block, late, x.grid)


@lru_cache(maxsize=4096)
def _plan(
    spec: ConvolutionSpec, x: Placement, weights: WeightMeta, algorithm: str, method: str | None
) -> tuple[LayerPart, SpatialPlan]:
    shape = spec.output_shape(x.shape, weights.shape, weights.bias)
    maps = spec.index_maps(weights.shape[2:])
    layer = Layer(
        spec.name,
        x,
        weights,
        shape,
        needs=(Same(), Same(), *spec.inputs_to_gather(maps, x.cuts)),
        algorithm=algorithm,
        groups=spec.groups,
        transposed=spec.transposed,
    )
    part = layer_part(layer)
    own = replace(spec, groups=part.groups)
    boundary = None
    smallest = spec.fewest_to_overlap(weights.shape) // part.blocks
    if part.stays and may_overlap(x, method, smallest):
        boundary = boundary_of(own, x, maps, *part.alone(x))
    plan = spatial_plan(own, x, maps, shape, part.needs, part.cuts, part.box, boundary)
    return part, plan
