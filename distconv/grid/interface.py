"""The interface that operators use of a grid: a `ProcessGrid`, or the grid of a dry run."""

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
    """A grid of ranks with named axes, seen from one rank, with the means to reach the others.

    Attributes
    ----------
    topology: the arithmetic of rank numbers and coordinates.
    rank: this rank's number in the grid.
    size: the number of ranks.
    device: this rank's device, on which all its DistTensors on the grid live.
    computes_on_gpu: whether operators run on a GPU, or would in a dry run.
    transport: the carrier of the grid's messages.
    journal: the calls and messages of this rank, compared with the other ranks of the grid.
    tensor_type: the class of the grid's tensors, if it is not DistTensor itself.
    """

    # No properties: every operator asks for them.
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
        """Return the communicator of the ranks that differ from this one along `axes` only.

        These ranks make it together at the first call. It has `size` and `rank`. Reductions that
        run at the same time need different purposes.

        Examples
        --------
        >>> grid = dc.ProcessGrid(sample=2)
        >>> replicas = grid.communicator(["sample"])  # this rank and those with other samples
        >>> replicas.size
        2
        """

    @abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks in rank order. All ranks of the grid call it together.

        Examples
        --------
        >>> grid = dc.ProcessGrid(height=2)
        >>> grid.all_gather_object(f"rank {grid.rank}")
        ['rank 0', 'rank 1']
        """

    def waiting(self) -> Wait:
        """Return a context for code that waits for other ranks.

        The watching thread of `grid/stall.py` sees the wait, and reports it if it lasts too long.
        """
        return Wait(self.journal.waiting)

    def __copy__(self) -> Grid:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Grid:
        return self

    def __repr__(self) -> str:
        return f"ProcessGrid({self.topology}) on {self.size} rank{'s' if self.size > 1 else ''}"
