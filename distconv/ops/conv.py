"""Convolution on cut planes and channels, with any stride, dilation, groups and padding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from distconv.boundary import reaches
from distconv.ops.channels import Part, part_of
from distconv.ops.checked import checked, shape_of
from distconv.ops.convolve import overlapped_convolution
from distconv.ops.overlap import may_overlap
from distconv.ops.windowed import Sizes, batched, input_of, needs_of, tuple_of, windowed_block
from distconv.tensor import DistTensor, gathered, implements
from distconv.window import Same, Window


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
        if x.shape[1] != weight.shape[1] * groups:
            raise RuntimeError(
                f"{name}: the weight {tuple(weight.shape)} in {groups} groups takes "
                f"{weight.shape[1] * groups} channels, the input {tuple(x.shape)} has {x.shape[1]}"
            )
        sizes = shape_of(x), shape_of(weight), shape_of(bias)
        shape = checked(function, *sizes, strides, padding, dilations, groups)
        kernel = tuple(weight.shape[2:])
        windows = [
            Window(k, s, d, p)
            for k, s, d, p in zip(
                kernel, strides, dilations, _sides(padding, kernel, dilations), strict=True
            )
        ]
        needs = (Same(), Same(), *needs_of(windows, x.cuts))
        part = part_of(name, x, weight, bias, shape, needs, groups=groups)
        if _overlaps(x, part, weight.numel(), tuple(windows)):
            block, made = part.alone(x, shape)
            operands = block, part.weight, part.bias, windows, made, part.groups, part.operator
            return part.finish(overlapped_convolution(*operands).shard)

        def compute(buffer: Tensor, left: tuple[int, ...]) -> Tensor:
            operands = buffer, part.weight, part.bias
            return function(*operands, strides, left, dilations, part.groups)

        buffer = gathered(x, part.needs, part.cuts, part.operator)
        if not part.weight.numel():
            return part.finish(part.nothing(buffer))
        return part.finish(windowed_block(buffer, windows, x.cuts, part.box.shape, compute))


def _overlaps(x: DistTensor, part: Part, weights: int, windows: tuple[Window, ...]) -> bool:
    """Whether to compute while halos travel; the same on all ranks.

    Every side of the block costs another convolution, which handles the weights once more. Where
    a rank has fewer inputs than there are weights, assembling its inputs was measured to cost less.
    """
    if not part.stays or not may_overlap(x, weights // part.blocks):
        return False
    parts = tuple(x.grid.topology.parts(axes) for axes in x.cuts[2:])
    return bool(reaches(windows, tuple(x.shape[2:]), parts))


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
