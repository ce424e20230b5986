"""Convolution on cut planes and channels, with any stride, dilation, groups and padding."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from distconv.geometry.halo.convolution import boundary, reaches
from distconv.geometry.index_maps import Same, Window
from distconv.ops.conv.channels import Layer, Weights, algorithm, part_of
from distconv.ops.conv.local_convolution import (
    Convolution,
    Decision,
    decision,
    overlapped_convolution,
)
from distconv.ops.support.argument_forms import Sizes, batched, tuple_of
from distconv.ops.support.metadata_checks import Like, checked
from distconv.ops.support.method import forced
from distconv.ops.support.operands import Placement
from distconv.ops.support.types import input_of
from distconv.ops.windowed.assembled import needs_of, windowed_block
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import gathered


def _convolution(function: Callable[..., Tensor], spatial: int) -> None:
    name = f"conv{spatial}d"

    @implements(function)
    @batched(name, spatial)
    def rule(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Sizes = 1,
        padding: Sizes | str = 0,
        dilation: Sizes = 1,
        groups: int = 1,
    ) -> DistTensor:
        x = input_of(name, input, weight, bias)
        strides = tuple_of(stride, spatial, "stride")
        dilations = tuple_of(dilation, spatial, "dilation")
        padding = padding if isinstance(padding, str) else tuple_of(padding, spatial, "padding")
        arguments = strides, padding, dilations, groups
        part, windows, overlap = decide(
            Placement.of(x), Weights.of(weight, bias), arguments, algorithm(), forced()
        )
        weight, bias, late = part.operands(weight, bias)
        if overlap is not None:
            block = overlapped_convolution(x, weight, bias, *overlap, part.operator)
            return part.finish(block, late, x.grid)

        def compute(buffer: Tensor, left: tuple[int, ...]) -> Tensor:
            return function(buffer, weight, bias, strides, left, dilations, part.groups)

        buffer = gathered(x, part.needs, part.cuts, part.operator)
        if not weight.numel():
            block = part.nothing(buffer, weight, bias)
        else:
            block = windowed_block(buffer, windows, x.cuts, part.box.shape, compute)
        return part.finish(block, late, x.grid)

    @lru_cache(maxsize=4096)
    def decide(
        x: Placement, weights: Weights, arguments: Any, algorithm: str, method: str | None
    ) -> Decision:
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
        made = checked(function, Like(x.shape), *weights.like(), *arguments)
        sides = _sides(padding, weight[2:], dilations)
        windows = tuple(map(Window, weight[2:], strides, dilations, sides))
        # Without elements, torch looks at this in some versions alone.
        for window, size in zip(windows, x.shape[2:], strict=True):
            if window.extent > size + sum(window.padding):
                raise RuntimeError(
                    f"{name}: the kernel {weight[2:]} reaches over {window.extent} positions, and "
                    f"the input {x.shape} with its padding has {size + sum(window.padding)}"
                )
        needs = (Same(), Same(), *needs_of(windows, x.cuts))
        part = part_of(Layer(name, x, weights, made, needs, algorithm, groups=groups))
        # Every side of the block costs another convolution, which handles the weights once more.
        # Where a rank has fewer inputs than there are weights, assembling them was measured to cost
        # less.
        smallest = prod(weight) // part.blocks
        local = Convolution(strides, dilations, part.groups)
        return decision(part, x, windows, local, method, smallest, reaches, boundary)


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
