"""Arguments of convolutions and transposed convolutions, and the index maps that follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, ClassVar

from torch import Tensor

from distconv.device.kinds import Thresholds
from distconv.geometry.halo import LocalInput
from distconv.geometry.index_maps import IndexMap, Same, TransposedWindow, Window, cached
from distconv.geometry.layout import Box, Cuts, Shape
from distconv.ops.support.arguments import TensorMeta, check_on_meta
from distconv.ops.support.operands import Placement
from distconv.ops.support.windows import window_needs

# The arguments of a convolution, from which each rank derives plans without communication.


Sides = tuple[int, ...]
"""A number for each spatial dimension."""


@dataclass(frozen=True, eq=False)
class Convolution:
    """The arguments of a convolution: each output needs one window of inputs.

    Attributes
    ----------
    function: torch's function, such as torch.conv2d.
    padding: a number for each spatial dimension, or "valid" or "same".
    """

    function: Callable[..., Tensor]
    stride: Sides
    padding: Any
    dilation: Sides
    groups: int

    transposed: ClassVar[bool] = False
    """Whether the weight is (channel, filter, *kernel), not (filter, channel, *kernel)."""

    @cached_property
    def name(self) -> str:
        """Return the name of torch's function, for messages and records."""
        return self.function.__name__

    def output_shape(self, x: Shape, weight: Shape, bias: Shape | None) -> Shape:
        """Return the global shape of the output, or raise for arguments that torch rejects.

        `x`, `weight` and `bias` are global shapes, so all ranks raise, or none. Raises RuntimeError
        if torch does not support the arguments.
        """
        groups, padding = self.groups, self.padding
        if x[1] != weight[1] * groups:
            raise RuntimeError(
                f"{self.name}: the weight {weight} in {groups} groups expects "
                f"{weight[1] * groups} channels, but the input {x} has {x[1]}"
            )
        self.refuse_empty(weight, (weight[0], *weight[2:]))
        self.refuse_standing_windows()
        if not isinstance(padding, str) and min(padding) < 0:
            raise RuntimeError(
                f"{self.name}: negative padding {padding} is not supported; slice x instead"
            )
        arguments = self.stride, padding, self.dilation, groups
        tensors = (None if n is None else TensorMeta(n) for n in (x, weight, bias))
        made: Shape = check_on_meta(self.function, *tensors, *arguments)
        # For tensors without elements, only some versions of torch check this.
        for window, size in zip(self.index_maps(weight[2:]), x[2:], strict=True):
            if window.extent > size + sum(window.padding):
                raise RuntimeError(
                    f"{self.name}: the kernel {weight[2:]} covers {window.extent} positions, but "
                    f"the input {x} with its padding has {size + sum(window.padding)}; pad the "
                    "input, or use a smaller kernel or dilation"
                )
        return made

    def refuse_empty(self, weight: Shape, sizes: Sequence[int]) -> None:
        """Raise RuntimeError if one of `sizes` is 0.

        `sizes` are the sizes of those dimensions of the global shape `weight` that must have
        elements for torch's kernels.
        """
        if 0 in sizes:
            raise RuntimeError(
                f"{self.name}: the weight {weight} has no elements; expected 1 or more in every "
                "dimension"
            )

    def refuse_standing_windows(self) -> None:
        """Raise RuntimeError if a stride or a dilation is below 1."""
        for what, numbers in (("stride", self.stride), ("dilation", self.dilation)):
            if min(numbers) < 1:
                raise RuntimeError(f"{self.name}: non-positive {what} {numbers} is not supported")

    def index_maps(self, kernel: Shape) -> tuple[Any, ...]:
        """Return the index map of each spatial dimension for a kernel of spatial shape `kernel`."""
        sides = _sides(self.padding, kernel, self.dilation)
        return tuple(map(Window, kernel, self.stride, self.dilation, sides))

    def inputs_to_gather(self, maps: tuple[Any, ...], cuts: Cuts) -> Sequence[IndexMap]:
        """Return for each spatial dimension the index map of the inputs that a rank gathers.

        `maps` is the result of `index_maps`; `cuts` has for each dimension the grid axes that
        partition the input. A dimension that is not partitioned may have `Same` instead of its map;
        the local operator then pads it.
        """
        return window_needs(maps, cuts)

    def fewest_to_overlap(self, weight: Shape, sizes: Thresholds) -> int:
        """Return the number of input elements per rank from which overlap is faster than assembly.

        `weight` is the shape of a weight that is replicated on every rank; `sizes` are the
        thresholds of the device.
        """
        # Every side of the block needs another convolution, which reads the weights once more.
        # Assembly was measured to be faster for a rank with fewer inputs than weights, or with few
        # inputs.
        return max(prod(weight), sizes.overlapped)

    def buffer(self, maps: tuple[Any, ...], x: Placement, box: Box) -> LocalInput:
        """Return padding and shape for computing the outputs in `box` from the gathered inputs.

        `maps` is the result of `index_maps`; `x` is the placement of the global input. The `shape`
        of the result is the smallest input that the local operator accepts, for ranks without
        outputs.
        """
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
    """Return the padding, a number or "valid" or "same", as (before, after) of each dimension."""
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(int(p), int(p)) for p in padding]


# Transposed convolution: each input contributes to a window of outputs.


@dataclass(frozen=True, eq=False)
class TransposedConvolution(Convolution):
    """The arguments of a transposed convolution: each input contributes to a window of outputs."""

    output_padding: Sides

    transposed = True

    def output_shape(self, x: Shape, weight: Shape, bias: Shape | None) -> Shape:
        """Return the global shape of the output, or raise for arguments that torch rejects."""
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
        # `check_on_meta` does not check output_padding, nor do kernels for an empty block.
        if any(e >= max(s, d) for e, s, d in zip(extras, strides, dilations, strict=True)):
            raise RuntimeError(
                f"{name}: output_padding={extras} must be smaller than stride={strides} or "
                f"dilation={dilations}"
            )
        return made

    @cached
    def has_no_outputs(self, x: Shape, kernel: Shape) -> bool:
        """Return whether the output has size 0 along a spatial dimension.

        `x` is the global shape of the input, `kernel` the spatial shape of the kernel.
        """
        maps = self.index_maps(kernel)
        # A wrong number of dimensions raises an error later.
        return any(m.output_size(n) == 0 for m, n in zip(maps, x[2:], strict=False))

    def index_maps(self, kernel: Shape) -> tuple[TransposedWindow, ...]:
        """Return the index map of each spatial dimension for a kernel of spatial shape `kernel`."""
        numbers = self.stride, self.dilation, self.padding, self.output_padding
        return tuple(map(TransposedWindow, kernel, *numbers))

    def inputs_to_gather(
        self, maps: tuple[TransposedWindow, ...], cuts: Cuts
    ) -> Sequence[IndexMap]:
        """Return for each spatial dimension the index map of the inputs that a rank gathers.

        `maps` is the result of `index_maps`; `cuts` has for each dimension the grid axes that
        partition the input. A dimension that is not partitioned has `Same` instead of its map.
        """
        return [m if axes else Same() for m, axes in zip(maps, cuts[2:], strict=True)]

    def fewest_to_overlap(self, weight: Shape, sizes: Thresholds) -> int:
        """Return the number of input elements per rank from which overlap is faster than assembly.

        `weight` is the shape of a weight that is replicated on every rank; `sizes` are the
        thresholds of the device.
        """
        # As for convolution, the sides read the weights again. Assembly saves less here, as it
        # computes outputs that are cropped.
        return max(prod(weight) // 4, sizes.overlapped_transposed)

    def buffer(self, maps: tuple[TransposedWindow, ...], x: Placement, box: Box) -> LocalInput:
        """Return padding, output padding and crop for the outputs in `box` of gathered inputs.

        `maps` is the result of `index_maps`; `x` is the placement of the global input.
        """
        # Along a partitioned dimension the local result begins at the first output of its first
        # input, and ends at the last output of its last input, or at the end of the box if outputs
        # follow to which no input contributes.
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
