"""Transposed convolution: each input reaches a window of outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from torch import Tensor

from distconv.geometry.halo.transposed_convolution import (
    transposed_convolution_boundary,
    transposed_needs_halo,
)
from distconv.geometry.index_maps import IndexMap, Same, TransposedWindow
from distconv.geometry.layout import Box, Cuts, Shape
from distconv.ops.conv import volumes
from distconv.ops.conv.kernels import recorded_convolution
from distconv.ops.conv.specification import ConvolutionSpec, Sides
from distconv.ops.support.metadata_checks import check_shapes
from distconv.tensor.dist_tensor import DistTensor


@dataclass(frozen=True)
class TransposedConvolution(ConvolutionSpec):
    """A transposed convolution, with `output_padding` more outputs at the end."""

    output_padding: Sides

    transposed = True
    needs_halo = staticmethod(transposed_needs_halo)
    boundary = staticmethod(transposed_convolution_boundary)

    @cached_property
    def arguments(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.output_padding, self.groups, self.dilation

    def output_shape(self, x: Shape, weight: Shape, bias: Shape | None) -> Shape:
        name, strides, dilations = self.name, self.stride, self.dilation
        extras = self.output_padding
        if min(strides) < 1:
            raise RuntimeError(f"{name}: non-positive stride {strides} is not supported")
        if min(self.padding) < 0:
            raise RuntimeError(
                f"{name}: negative padding {self.padding} is not supported; use F.pad"
            )
        arguments = strides, self.padding, extras, self.groups, dilations
        made: Shape = check_shapes(self.function, (x, weight, bias), *arguments)
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
        return made

    def index_maps(self, kernel: Shape) -> tuple[TransposedWindow, ...]:
        numbers = self.stride, self.dilation, self.padding, self.output_padding
        return tuple(map(TransposedWindow, kernel, *numbers))

    def inputs_to_gather(
        self, maps: tuple[TransposedWindow, ...], cuts: Cuts
    ) -> Sequence[IndexMap]:
        return [m if axes else Same() for m, axes in zip(maps, cuts[2:], strict=True)]

    def fewest_to_overlap(self, weight: Shape) -> int:
        # As for convolution, the sides handle the weights again. Assembling saves less here, as it
        # makes outputs that are cropped, and was measured to cost less with few inputs alone.
        return prod(weight) // 4

    def assembled(
        self,
        buffer: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        x: DistTensor,
        maps: tuple[TransposedWindow, ...],
        box: Box,
    ) -> Tensor:
        strides, dilations, groups = self.stride, self.dilation, self.groups
        if not prod(box.shape):
            # The local operator refuses empty planes, but not an empty batch.
            buffer = buffer.reshape(0, buffer.shape[1], *(max(n, 2) for n in weight.shape[2:]))
            nothing = self.function(buffer, weight, bias, strides, 0, 0, groups, dilations)
            return nothing.reshape(box.shape)
        # Along a cut dimension the local result starts where its first input writes first, and
        # ends where its last input writes last, unless more outputs follow that no input reaches.
        cut = [bool(axes) for axes in x.cuts[2:]]
        own = list(zip(maps, x.shape[2:], box.start[2:], box.stop[2:], strict=True))
        written = [m.written(n, a, b) for m, n, a, b in own]
        left = [0 if c else p for c, p in zip(cut, self.padding, strict=True)]
        beyond = [
            max(0, b - last) if c else extra
            for c, extra, (_, _, _, b), (_, last) in zip(
                cut, self.output_padding, own, written, strict=True
            )
        ]
        operands = buffer, weight, bias
        rest = strides, left, dilations, True, beyond, groups
        if volumes.gains(buffer, weight, *rest):
            result = recorded_convolution(volumes.KERNELS, *operands, *rest)
        else:
            result = self.function(*operands, strides, left, beyond, groups, dilations)
        for d, ((_, _, a, b), (first, _)) in enumerate(zip(own, written, strict=True), 2):
            if cut[d - 2]:
                result = result.narrow(d, a - first, b - a)
        return result
