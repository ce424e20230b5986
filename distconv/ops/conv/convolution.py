"""Convolution: with any stride, dilation, groups and padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from distconv.geometry.halo.convolution import convolution_boundary, needs_halo
from distconv.geometry.halo.slabs import LocalInput
from distconv.geometry.index_maps import IndexMap, Window
from distconv.geometry.layout import Box, Cuts, Shape
from distconv.ops.conv.specification import ConvolutionSpec
from distconv.ops.support.metadata_checks import TensorMeta, check_on_meta
from distconv.ops.support.operands import Placement
from distconv.ops.windowed.assembled import window_needs

FEWEST_TO_OVERLAP = 2**15 + 1
"""The smallest block, in elements, with which a convolution overlaps, whatever its weights are.
Assembled, a network of 8 small layers took 0.91 of the time with blocks of 2**14 elements, 0.98
with 2**15 and 1.015 with 2**16."""


@dataclass(frozen=True)
class Convolution(ConvolutionSpec):
    """A convolution: each output needs one window of inputs."""

    transposed = False
    needs_halo = staticmethod(needs_halo)
    boundary = staticmethod(convolution_boundary)

    def output_shape(self, x: Shape, weight: Shape, bias: Shape | None) -> Shape:
        groups, padding = self.groups, self.padding
        if x[1] != weight[1] * groups:
            raise RuntimeError(
                f"{self.name}: the weight {weight} in {groups} groups takes {weight[1] * groups} "
                f"channels, the input {x} has {x[1]}"
            )
        if not isinstance(padding, str) and min(padding) < 0:
            raise RuntimeError(
                f"{self.name}: negative padding {padding} is not supported; cut x instead"
            )
        arguments = self.stride, padding, self.dilation, groups
        tensors = (None if n is None else TensorMeta(n) for n in (x, weight, bias))
        made: Shape = check_on_meta(self.function, *tensors, *arguments)
        # Without elements, only some versions of torch check this.
        for window, size in zip(self.index_maps(weight[2:]), x[2:], strict=True):
            if window.extent > size + sum(window.padding):
                raise RuntimeError(
                    f"{self.name}: the kernel {weight[2:]} reaches over {window.extent} positions, "
                    f"and the input {x} with its padding has {size + sum(window.padding)}; pad the "
                    "input, or use a smaller kernel or dilation"
                )
        return made

    def index_maps(self, kernel: Shape) -> tuple[Window, ...]:
        sides = _sides(self.padding, kernel, self.dilation)
        return tuple(map(Window, kernel, self.stride, self.dilation, sides))

    def inputs_to_gather(self, maps: tuple[Window, ...], cuts: Cuts) -> Sequence[IndexMap]:
        return window_needs(maps, cuts)

    def fewest_to_overlap(self, weight: Shape) -> int:
        # Every side of the block costs another convolution, which reads the weights once more.
        # Where a rank has fewer inputs than weights, or few inputs, assembling was measured to be
        # faster.
        return max(prod(weight), FEWEST_TO_OVERLAP)

    def buffer(self, maps: tuple[Window, ...], x: Placement, box: Box) -> LocalInput:
        empty = not prod(box.shape)
        padding = tuple(
            0 if empty or isinstance(needed, Window) else w.padding[0]
            for w, needed in zip(maps, self.inputs_to_gather(maps, x.cuts), strict=True)
        )
        shape = (1, 1, *(w.extent for w in maps))
        return LocalInput(shape, padding, (0,) * len(maps))


def _sides(
    padding: str | tuple[int, ...], kernel: tuple[int, ...], dilation: tuple[int, ...]
) -> list[tuple[int, int]]:
    """Return the padding before and after each spatial dimension."""
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(int(p), int(p)) for p in padding]
