"""Specifications of convolutions, from which all ranks decide alike, without messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from distconv.geometry.halo.slabs import Boundary, LocalInput
from distconv.geometry.index_maps import IndexMap
from distconv.geometry.layout import Box, Cuts, Shape
from distconv.ops.conv.local_convolution import LocalConvolution
from distconv.ops.support.operands import Placement

Sides = tuple[int, ...]
"""A number for each spatial dimension."""


@dataclass(frozen=True)
class ConvolutionSpec(ABC):
    """A kind of convolution with its arguments; the kinds are its subclasses.

    Attributes
    ----------
    function: torch's function, such as torch.conv2d.
    padding: the padding in the form which that function takes; numbers, or "valid" or "same".
    """

    function: Callable[..., Tensor]
    stride: Sides
    padding: Any
    dilation: Sides
    groups: int

    transposed: ClassVar[bool]
    """Whether the weight is (channel, filter, *kernel), not (filter, channel, *kernel)."""
    needs_halo: ClassVar[Callable[..., bool | None]]
    """A function (maps, sizes, parts) that returns whether any rank needs a halo; None where blocks
    of inputs and outputs do not line up."""
    boundary: ClassVar[Callable[..., Boundary]]
    """A function (topology, rank, shape, made, cuts, maps) that returns a rank's `Boundary`."""

    @cached_property
    def name(self) -> str:
        """Return the name of the function for messages and records."""
        return self.function.__name__

    @cached_property
    def local(self) -> LocalConvolution:
        """Return the local operator of this convolution."""
        return LocalConvolution(
            self.function, self.stride, self.dilation, self.groups, self.transposed
        )

    @abstractmethod
    def output_shape(self, x: Shape, weight: Shape, bias: Shape | None) -> Shape:
        """Return the global shape of the output; raise for arguments that torch refuses.

        Called with global shapes, it raises on all ranks or on none.
        """

    @abstractmethod
    def index_maps(self, kernel: Shape) -> tuple[Any, ...]:
        """Return the map from outputs to inputs of each spatial dimension."""

    @abstractmethod
    def inputs_to_gather(self, maps: tuple[Any, ...], cuts: Cuts) -> Sequence[IndexMap]:
        """Return the index map with which each spatial dimension is gathered to assemble."""

    @abstractmethod
    def fewest_to_overlap(self, weight: Shape) -> int:
        """Return the smallest number of a rank's inputs with which overlapping is faster."""

    @abstractmethod
    def buffer(self, maps: tuple[Any, ...], x: Placement, box: Box) -> LocalInput:
        """Return the local operator's input for the outputs in `box`, gathered for them.

        Where there are no outputs, it makes some from the fewest inputs that it accepts.

        Parameters
        ----------
        x: the placement of the whole input.
        """
