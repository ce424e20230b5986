"""A convolution, and a transposed one, as plans: what a rank needs, and what it computes."""

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

# The arguments of a convolution, from which each rank derives plans without messages.


Sides = tuple[int, ...]
"""A number for each spatial dimension."""


@dataclass(frozen=True, eq=False)
class Convolution:
    """The arguments of a convolution, in which each output needs one window of inputs.

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
        """Return the global shape of the output; raise for arguments that torch refuses.

        Called with global shapes, it raises on all ranks or on none.
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
        # Without elements, only some versions of torch check this.
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

        They are the sizes of the global shape `weight` that torch's kernels refuse to be 0.
        """
        if 0 in sizes:
            raise RuntimeError(
                f"{self.name}: the weight {weight} has no elements; expected 1 or more in every "
                "dimension"
            )

    def refuse_standing_windows(self) -> None:
        """Raise RuntimeError for a stride or a dilation below 1, which torch checks by elements."""
        for what, numbers in (("stride", self.stride), ("dilation", self.dilation)):
            if min(numbers) < 1:
                raise RuntimeError(f"{self.name}: non-positive {what} {numbers} is not supported")

    def index_maps(self, kernel: Shape) -> tuple[Any, ...]:
        """Return the index map of each spatial dimension for a kernel of spatial shape `kernel`."""
        sides = _sides(self.padding, kernel, self.dilation)
        return tuple(map(Window, kernel, self.stride, self.dilation, sides))

    def inputs_to_gather(self, maps: tuple[Any, ...], cuts: Cuts) -> Sequence[IndexMap]:
        """Return for each spatial dimension the index map that gathers an assembled buffer.

        `maps` are the results of `index_maps`, `cuts` the cuts of the input. A dimension that is
        whole on every rank may have `Same` in place of its map; the local operator then pads it.
        """
        return window_needs(maps, cuts)

    def fewest_to_overlap(self, weight: Shape, sizes: Thresholds) -> int:
        """Return the number of inputs per rank from which overlapping is faster than assembling.

        `weight` is the shape of a weight that every rank holds in full, `sizes` are the thresholds
        of the device.
        """
        # Every side of the block costs another convolution, which reads the weights once more.
        # Where a rank has fewer inputs than weights, or few inputs, assembling was measured to be
        # faster.
        return max(prod(weight), sizes.overlapped)

    def buffer(self, maps: tuple[Any, ...], x: Placement, box: Box) -> LocalInput:
        """Return the local operator's arguments for computing the outputs in `box` from a buffer.

        `maps` are the results of `index_maps`, `x` is the placement of the whole input. Ranks
        without outputs call the operator with an input of the result's `shape`, the smallest that
        it accepts.
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
    """Return the padding before and after each spatial dimension."""
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(int(p), int(p)) for p in padding]


# Transposed convolution: each input reaches a window of outputs.


@dataclass(frozen=True, eq=False)
class TransposedConvolution(Convolution):
    """The arguments of a transposed convolution: each input reaches a window of outputs."""

    output_padding: Sides

    transposed = True

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
                f"{name}: output_padding={extras} must be smaller than stride={strides} or "
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
