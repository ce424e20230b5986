"""The abstract class of grids, by which operators use a `ProcessGrid` or the grid of a dry run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from distconv.geometry.topology import AXES, Topology
from distconv.grid.journal import Journal, Wait
from distconv.torch_private import install_patches
from distconv.transport.interface import Transport


class Grid(ABC):
    """A grid of ranks with named axes, with which one rank communicates with the others.

    Attributes
    ----------
    topology: the number of ranks along each axis, and conversions between ranks and coordinates.
    rank: this rank's number in the grid.
    size: the number of ranks.
    device: the device of all this rank's shards on the grid.
    computes_on_gpu: whether operators run on a GPU, or would do so in a dry run.
    transport: the transport of the grid's messages.
    journal: the calls and messages of this rank, for comparison with the other ranks of the grid.
    tensor_type: the subclass of DistTensor for the grid's tensors; None for DistTensor itself.
    """

    # Plain attributes, not properties, as every operator reads them.
    topology: Topology
    rank: int
    size: int
    device: torch.device
    computes_on_gpu: bool
    transport: Transport
    journal: Journal
    tensor_type: ClassVar[Any] = None

    def __init__(
        self,
        topology: Topology,
        rank: int,
        device: torch.device,
        transport: Transport,
        journal: Journal,
        computes_on_gpu: bool,
    ) -> None:
        self.topology, self.rank, self.size = topology, rank, topology.size
        self.device, self.transport, self.journal = device, transport, journal
        self.computes_on_gpu = computes_on_gpu
        install_patches()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in Grid.__annotations__ and name in self.__dict__:
            raise AttributeError(f"the {name} of a grid is fixed; create another grid")
        super().__setattr__(name, value)

    @property
    def shape(self) -> dict[str, int]:
        """Return the number of ranks along each axis."""
        return dict(zip(AXES, self.topology.extents, strict=True))

    @property
    def coords(self) -> dict[str, int]:
        """Return this rank's position along each axis."""
        return self.topology.coordinates(self.rank)

    @abstractmethod
    def communicator(self, axes: Iterable[str], purpose: str = "reductions") -> Any:
        """Return the communicator of this rank and the ranks that differ from it along `axes` only.

        The communicator has attributes `size` and `rank`. Reductions that run at the same time need
        different purposes. The first call is collective over the ranks of the communicator.

        Examples
        --------
        >>> grid = dc.ProcessGrid(sample=2)
        >>> replicas = grid.communicator(["sample"])  # this rank and those with other samples
        >>> replicas.size
        2
        """

    @abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks of the grid, in rank order. Collective.

        Examples
        --------
        >>> grid = dc.ProcessGrid(height=2)
        >>> grid.all_gather_object(f"rank {grid.rank}")
        ['rank 0', 'rank 1']
        """

    def waiting(self) -> Wait:
        """Return a context for code that waits for other ranks.

        The watching thread of `grid/stall.py` reports the wait if it lasts too long.
        """
        return Wait(self.journal.waiting)

    def __copy__(self) -> Grid:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Grid:
        return self

    def __repr__(self) -> str:
        return f"ProcessGrid({self.topology}) on {self.size} rank{'s' if self.size > 1 else ''}"
