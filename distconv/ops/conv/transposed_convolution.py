"""Transposed convolution on cut planes: every rank computes its own block of the output."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from distconv.geometry.halo.transposed_convolution import (
    transposed_convolution_boundary,
    transposed_needs_halo,
)
from distconv.geometry.index_maps import Same, TransposedWindow
from distconv.ops.conv.channels import Layer, WeightMeta, algorithm, layer_part
from distconv.ops.conv.local_convolution import (
    Convolution,
    ConvolutionPlan,
    overlapped_convolution,
    plan_convolution,
)
from distconv.ops.support.argument_forms import Sizes, accepts_unbatched, to_tuple
from distconv.ops.support.metadata_checks import TensorMeta, check_on_meta
from distconv.ops.support.method import chosen_method
from distconv.ops.support.operands import Placement
from distconv.ops.support.types import distributed_input
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import gather_inputs


def _transposed_convolution(function: Callable[..., Tensor], spatial: int) -> None:
    name = f"conv_transpose{spatial}d"

    @implements(function)
    @accepts_unbatched(name, spatial)
    def rule(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        dilation: Sizes = 1,
    ) -> DistTensor:
        x = distributed_input(name, input, weight, bias)
        strides = to_tuple(stride, spatial, "stride")
        paddings = to_tuple(padding, spatial, "padding")
        extras = to_tuple(output_padding, spatial, "output_padding")
        dilations = to_tuple(dilation, spatial, "dilation")
        arguments = strides, paddings, extras, groups, dilations
        part, maps, overlap = decide(
            Placement.of(x), WeightMeta.of(weight, bias), arguments, algorithm(), chosen_method()
        )
        weight, bias, late = part.operands(weight, bias)
        if overlap is not None:
            block = overlapped_convolution(x, weight, bias, *overlap, part.operator)
            return part.finish(block, late, x.grid)
        buffer = gather_inputs(x, part.needs, part.cuts, part.operator)
        if not weight.numel():
            return part.finish(part.empty_result(buffer, weight, bias), late, x.grid)
        groups, box = part.groups, part.box
        if not prod(box.shape):
            # The local operator refuses empty planes, but not an empty batch.
            buffer = buffer.reshape(0, buffer.shape[1], *(max(n, 2) for n in weight.shape[2:]))
            result = function(buffer, weight, bias, strides, 0, 0, groups, dilations)
            return part.finish(result.reshape(box.shape), late, x.grid)
        # Along a cut dimension the local result starts where its first input writes first, and
        # ends where its last input writes last, unless more outputs follow that no input reaches.
        cut = [bool(axes) for axes in x.cuts[2:]]
        own = list(zip(maps, x.shape[2:], box.start[2:], box.stop[2:], strict=True))
        written = [m.written(n, a, b) for m, n, a, b in own]
        left = [0 if c else p for c, p in zip(cut, paddings, strict=True)]
        beyond = [
            max(0, b - last) if c else extra
            for c, extra, (_, _, _, b), (_, last) in zip(cut, extras, own, written, strict=True)
        ]
        result = function(buffer, weight, bias, strides, left, beyond, groups, dilations)
        for d, ((_, _, a, b), (first, _)) in enumerate(zip(own, written, strict=True), 2):
            if cut[d - 2]:
                result = result.narrow(d, a - first, b - a)
        return part.finish(result, late, x.grid)

    @lru_cache(maxsize=4096)
    def decide(
        x: Placement, weights: WeightMeta, arguments: Any, algorithm: str, method: str | None
    ) -> ConvolutionPlan:
        strides, paddings, extras, groups, dilations = arguments
        if min(strides) < 1:
            raise RuntimeError(f"{name}: non-positive stride {strides} is not supported")
        if min(paddings) < 0:
            raise RuntimeError(f"{name}: negative padding {paddings} is not supported; use F.pad")
        made = check_on_meta(function, TensorMeta(x.shape), *weights.like(), *arguments)
        # The check does not look at these, nor do ranks whose block is empty.
        if any(e >= max(s, d) for e, s, d in zip(extras, strides, dilations, strict=True)):
            raise RuntimeError(
                f"{name}: output_padding={extras} has to be smaller than stride={strides} or "
                f"dilation={dilations}"
            )
        if 0 in made[2:]:
            raise RuntimeError(
                f"{name}: the result {made} has no elements; expected from 1 in every dimension"
            )
        maps = tuple(map(TransposedWindow, weights.shape[2:], strides, dilations, paddings, extras))
        spatial_needs = (m if axes else Same() for m, axes in zip(maps, x.cuts[2:], strict=True))
        needs = (Same(), Same(), *spatial_needs)
        layer = Layer(name, x, weights, made, needs, algorithm, groups=groups, transposed=True)
        part = layer_part(layer)
        # As for convolution, the sides handle the weights again. Assembling saves less here, as it
        # makes outputs that are cropped, and was measured to cost less with few inputs alone.
        smallest = prod(weights.shape) // (4 * part.blocks)
        local = Convolution(strides, dilations, part.groups, transposed=True)
        return plan_convolution(
            part,
            x,
            maps,
            local,
            method,
            smallest,
            transposed_needs_halo,
            transposed_convolution_boundary,
        )


_transposed_convolution(torch.conv_transpose1d, 1)
_transposed_convolution(torch.conv_transpose2d, 2)
_transposed_convolution(torch.conv_transpose3d, 3)
