"""The arguments of a convolution, from which each rank derives plans without messages."""

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
    """The arguments of a convolution; its subclasses are the plain and the transposed convolution.

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

    transposed: ClassVar[bool]
    """Whether the weight is (channel, filter, *kernel), not (filter, channel, *kernel)."""
    needs_halo: ClassVar[Callable[..., bool | None]]
    """A function (maps, sizes, parts) that returns whether any rank needs a halo; None where blocks
    of inputs and outputs do not line up."""
    boundary: ClassVar[Callable[..., Boundary]]
    """A function (topology, rank, shape, made, cuts, maps) that returns a rank's `Boundary`."""

    @cached_property
    def name(self) -> str:
        """Return the name of torch's function, for messages and records."""
        return self.function.__name__

    @cached_property
    def local(self) -> LocalConvolution:
        """Return the operator that a rank runs on its own inputs."""
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
        """Return for each spatial dimension the map from outputs to inputs; `kernel` is a shape."""

    @abstractmethod
    def inputs_to_gather(self, maps: tuple[Any, ...], cuts: Cuts) -> Sequence[IndexMap]:
        """Return for each spatial dimension the index map that gathers an assembled buffer."""

    @abstractmethod
    def fewest_to_overlap(self, weight: Shape) -> int:
        """Return the number of inputs per rank from which overlapping is faster than assembling."""

    @abstractmethod
    def buffer(self, maps: tuple[Any, ...], x: Placement, box: Box) -> LocalInput:
        """Return the local operator's arguments for the outputs in `box`, from gathered inputs.

        The result's `shape` is the smallest input that the operator accepts, for ranks without
        outputs. `x` is the placement of the whole input.
        """
