"""Transposed convolution: each input reaches a window of outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from distconv.device.thresholds import Thresholds
from distconv.geometry.halo.slabs import LocalInput
from distconv.geometry.halo.transposed_convolution import (
    transposed_convolution_boundary,
    transposed_needs_halo,
)
from distconv.geometry.index_maps import IndexMap, Same, cached
from distconv.geometry.layout import Box, Cuts, Shape
from distconv.geometry.windows import TransposedWindow
from distconv.ops.conv.convolution import Convolution, Sides
from distconv.ops.support.metadata_checks import TensorMeta, check_on_meta
from distconv.ops.support.operands import Placement


@dataclass(frozen=True)
class TransposedConvolution(Convolution):
    """The arguments of a transposed convolution: each input reaches a window of outputs."""

    output_padding: Sides

    transposed = True
    needs_halo = staticmethod(transposed_needs_halo)
    boundary = staticmethod(transposed_convolution_boundary)

    def output_shape(self, x: Shape, weight: Shape, bias: Shape | None) -> Shape:
        """Return the global shape of the output; raise for arguments that torch refuses."""
        name, strides, dilations = self.name, self.stride, self.dilation
        extras = self.output_padding
        self.refuse_empty(weight, weight)
        self.refuse_standing_windows()
        if min(self.padding) < 0:
            raise RuntimeError(
                f"{name}: negative padding {self.padding} is not supported; use F.pad"
            )
        arguments = strides, self.padding, extras, self.groups, dilations
        tensors = (None if n is None else TensorMeta(n) for n in (x, weight, bias))
        made: Shape = check_on_meta(self.function, *tensors, *arguments)
        # The check does not see these, nor do ranks whose block is empty.
        if any(e >= max(s, d) for e, s, d in zip(extras, strides, dilations, strict=True)):
            raise RuntimeError(
                f"{name}: output_padding={extras} has to be smaller than stride={strides} or "
                f"dilation={dilations}"
            )
        return made

    @cached
    def has_no_outputs(self, x: Shape, kernel: Shape) -> bool:
        """Return whether a spatial dimension of the output of input `x` has no positions."""
        maps = self.index_maps(kernel)
        # Other numbers of dimensions are an error, found later.
        return any(m.output_size(n) == 0 for m, n in zip(maps, x[2:], strict=False))

    def index_maps(self, kernel: Shape) -> tuple[TransposedWindow, ...]:
        """Return the index map of each spatial dimension for a kernel of spatial shape `kernel`."""
        numbers = self.stride, self.dilation, self.padding, self.output_padding
        return tuple(map(TransposedWindow, kernel, *numbers))

    def inputs_to_gather(
        self, maps: tuple[TransposedWindow, ...], cuts: Cuts
    ) -> Sequence[IndexMap]:
        """Return for each spatial dimension the index map that gathers an assembled buffer.

        `maps` are the results of `index_maps`, `cuts` the cuts of the input. A dimension that is
        whole on every rank has `Same` in place of its map.
        """
        return [m if axes else Same() for m, axes in zip(maps, cuts[2:], strict=True)]

    def fewest_to_overlap(self, weight: Shape, sizes: Thresholds) -> int:
        """Return the number of inputs per rank from which overlapping is faster than assembling.

        `weight` is the shape of a weight that every rank holds in full, `sizes` are the thresholds
        of the device.
        """
        # As for convolution, the sides read the weights again. Assembling saves less here, as it
        # computes outputs that are cropped.
        return max(prod(weight) // 4, sizes.overlapped_transposed)

    def buffer(self, maps: tuple[TransposedWindow, ...], x: Placement, box: Box) -> LocalInput:
        """Return the local operator's arguments for the outputs in `box`, and how to crop them."""
        # Along a cut dimension the local result starts where its first input writes first, and
        # ends where its last input writes last, unless more outputs follow that no input reaches.
        empty = not prod(box.shape)
        padding, extra, crop = [], [], []
        rows = zip(maps, x.shape[2:], box.start[2:], box.stop[2:], x.cuts[2:], strict=True)
        for m, n, a, b, axes in rows:
            first, last = (a, b) if empty or not axes else m.written(n, a, b)
            padding.append(0 if empty or axes else m.padding)
            extra.append(0 if empty else max(0, b - last) if axes else m.output_padding)
            crop.append((a - first, max(0, last - b)))
        shape = (1,) * (2 + len(maps))
        shift = tuple(crop) if any(map(any, crop)) else None
        return LocalInput(shape, tuple(padding), tuple(extra), shift)
