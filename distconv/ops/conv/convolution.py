"""Convolution on cut planes and channels, with any stride, dilation, groups and padding."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from distconv.geometry.halo.convolution import convolution_boundary, needs_halo
from distconv.geometry.index_maps import Same, Window
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
from distconv.ops.windowed.assembled import window_needs, windowed_block
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import gather_inputs


def _convolution(function: Callable[..., Tensor], spatial: int) -> None:
    name = f"conv{spatial}d"

    @implements(function)
    @accepts_unbatched(name, spatial)
    def rule(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Sizes = 1,
        padding: Sizes | str = 0,
        dilation: Sizes = 1,
        groups: int = 1,
    ) -> DistTensor:
        x = distributed_input(name, input, weight, bias)
        strides = to_tuple(stride, spatial, "stride")
        dilations = to_tuple(dilation, spatial, "dilation")
        padding = padding if isinstance(padding, str) else to_tuple(padding, spatial, "padding")
        arguments = strides, padding, dilations, groups
        part, windows, overlap = decide(
            Placement.of(x), WeightMeta.of(weight, bias), arguments, algorithm(), chosen_method()
        )
        weight, bias, late = part.operands(weight, bias)
        if overlap is not None:
            block = overlapped_convolution(x, weight, bias, *overlap, part.operator)
            return part.finish(block, late, x.grid)

        def compute(buffer: Tensor, left: tuple[int, ...]) -> Tensor:
            return function(buffer, weight, bias, strides, left, dilations, part.groups)

        buffer = gather_inputs(x, part.needs, part.cuts, part.operator)
        if not weight.numel():
            block = part.empty_result(buffer, weight, bias)
        else:
            block = windowed_block(buffer, windows, x.cuts, part.box.shape, compute)
        return part.finish(block, late, x.grid)

    @lru_cache(maxsize=4096)
    def decide(
        x: Placement, weights: WeightMeta, arguments: Any, algorithm: str, method: str | None
    ) -> ConvolutionPlan:
        strides, padding, dilations, groups = arguments
        weight = weights.shape
        if x.shape[1] != weight[1] * groups:
            raise RuntimeError(
                f"{name}: the weight {weight} in {groups} groups takes {weight[1] * groups} "
                f"channels, the input {x.shape} has {x.shape[1]}"
            )
        if not isinstance(padding, str) and min(padding) < 0:
            raise RuntimeError(
                f"{name}: negative padding {padding} is not supported; cut x instead"
            )
        made = check_on_meta(function, TensorMeta(x.shape), *weights.like(), *arguments)
        sides = _sides(padding, weight[2:], dilations)
        windows = tuple(map(Window, weight[2:], strides, dilations, sides))
        # Without elements, torch looks at this in some versions alone.
        for window, size in zip(windows, x.shape[2:], strict=True):
            if window.extent > size + sum(window.padding):
                raise RuntimeError(
                    f"{name}: the kernel {weight[2:]} reaches over {window.extent} positions, and "
                    f"the input {x.shape} with its padding has {size + sum(window.padding)}"
                )
        needs = (Same(), Same(), *window_needs(windows, x.cuts))
        part = layer_part(Layer(name, x, weights, made, needs, algorithm, groups=groups))
        # Every side of the block costs another convolution, which handles the weights once more.
        # Where a rank has fewer inputs than there are weights, assembling them was measured to cost
        # less.
        smallest = prod(weight) // part.blocks
        local = Convolution(strides, dilations, part.groups)
        return plan_convolution(
            part, x, windows, local, method, smallest, needs_halo, convolution_boundary
        )


def _sides(
    padding: str | tuple[int, ...], kernel: tuple[int, ...], dilation: tuple[int, ...]
) -> list[tuple[int, int]]:
    """Padding before and after, per dimension."""
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(int(p), int(p)) for p in padding]


_convolution(torch.conv1d, 1)
_convolution(torch.conv2d, 2)
_convolution(torch.conv3d, 3)
