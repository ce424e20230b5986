"""Transposed convolution on cut planes: every rank computes its own block of the output."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from distconv.ops.channels import Part, part_of
from distconv.ops.checked import checked, shape_of
from distconv.ops.convolve import overlapped_transposed_convolution
from distconv.ops.overlap import may_overlap
from distconv.ops.windowed import Sizes, batched, input_of, tuple_of
from distconv.spread import spreads
from distconv.tensor import DistTensor, gathered, implements
from distconv.window import Same, Transposed


def _transposed_convolution(function: Callable[..., Tensor], spatial: int) -> None:
    name = f"conv_transpose{spatial}d"

    @implements(function)
    @batched(name, spatial)
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
        x = input_of(name, input, weight, bias)
        strides = tuple_of(stride, spatial, "stride")
        paddings = tuple_of(padding, spatial, "padding")
        extras = tuple_of(output_padding, spatial, "output_padding")
        dilations = tuple_of(dilation, spatial, "dilation")
        sizes = shape_of(x), shape_of(weight), shape_of(bias)
        shape = checked(function, *sizes, strides, paddings, extras, groups, dilations)
        # The check does not look at these, nor do ranks whose block is empty.
        if any(e >= max(s, d) for e, s, d in zip(extras, strides, dilations, strict=True)):
            raise RuntimeError(
                f"{name}: output_padding={extras} has to be smaller than stride={strides} or "
                f"dilation={dilations}"
            )
        if 0 in shape[2:]:
            raise RuntimeError(
                f"{name}: the result {shape} has no elements; expected from 1 in every dimension"
            )
        kernel = tuple(weight.shape[2:])
        maps = [
            Transposed(*arguments)
            for arguments in zip(kernel, strides, dilations, paddings, extras, strict=True)
        ]
        cut = [bool(axes) for axes in x.cuts[2:]]
        needs = (Same(), Same(), *(m if c else Same() for m, c in zip(maps, cut, strict=True)))
        part = part_of(name, x, weight, bias, shape, needs, groups=groups, transposed=True)
        if _overlaps(x, part, weight.numel(), tuple(maps)):
            block, made = part.alone(x, shape)
            operands = block, part.weight, part.bias, maps, made, part.groups, part.operator
            return part.finish(overlapped_transposed_convolution(*operands).shard)
        buffer = gathered(x, part.needs, part.cuts, part.operator)
        weight, bias, groups, box = part.weight, part.bias, part.groups, part.box
        if not weight.numel():
            return part.finish(part.nothing(buffer))
        if not prod(box.shape):
            # The local operator refuses empty planes, but not an empty batch.
            buffer = buffer.reshape(0, buffer.shape[1], *(max(n, 2) for n in kernel))
            result = function(buffer, weight, bias, strides, 0, 0, groups, dilations)
            return part.finish(result.reshape(box.shape))
        # Along a cut dimension the local result starts where its first input writes first, and
        # ends where its last input writes last, unless more outputs follow that no input reaches.
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
        return part.finish(result)


def _overlaps(x: DistTensor, part: Part, weights: int, maps: tuple[Transposed, ...]) -> bool:
    """Whether to compute while halos travel; the same on all ranks.

    As for convolution, the sides handle the weights again. Assembling saves less here, as it
    makes outputs that are cropped, and was measured to cost less with few inputs alone.
    """
    if not part.stays or not may_overlap(x, weights // (4 * part.blocks)):
        return False
    parts = tuple(x.grid.topology.parts(axes) for axes in x.cuts[2:])
    return bool(spreads(maps, tuple(x.shape[2:]), parts))


_transposed_convolution(torch.conv_transpose1d, 1)
_transposed_convolution(torch.conv_transpose2d, 2)
_transposed_convolution(torch.conv_transpose3d, 3)
