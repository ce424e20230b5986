"""The interface of a grid that operators use, whether its ranks are there or only rehearsed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from distconv.geometry.topology import AXES, Topology
from distconv.transport.interface import Transport


class Grid(ABC):
    """Ranks with named axes, as one of them sees them, and how it reaches the others."""

    def __init__(
        self, topology: Topology, rank: int, device: torch.device, transport: Transport
    ) -> None:
        self._topology, self._rank = topology, rank
        self._device, self._transport = device, transport

    @property
    def topology(self) -> Topology:
        """Return the arithmetic of rank numbers and coordinates."""
        return self._topology

    @property
    def rank(self) -> int:
        """Return this rank's number in the grid."""
        return self._rank

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self._topology.size

    @property
    def shape(self) -> dict[str, int]:
        """Return the number of ranks along each axis."""
        return dict(zip(AXES, self._topology.extents, strict=True))

    @property
    def coords(self) -> dict[str, int]:
        """Return this rank's position along each axis."""
        return self._topology.coordinates(self.rank)

    @property
    def device(self) -> torch.device:
        """Return this rank's device, on which all its DistTensors on the grid live."""
        return self._device

    @property
    def computes_on_gpu(self) -> bool:
        """Return whether operators run on a GPU, or are rehearsed for one."""
        return self._device.type == "cuda"

    @property
    def transport(self) -> Transport:
        """Return the carrier of this grid's messages."""
        return self._transport

    @abstractmethod
    def communicator(self, axes: Iterable[str], purpose: str = "reductions") -> Any:
        """Return the communicator of the ranks that differ from this one along `axes` only.

        Made when first asked for, by all ranks of it together. It has `size` and `rank`; reductions
        that may be under way at the same time need different purposes.
        """

    @property
    def numbers_tensors(self) -> bool:
        """Return whether a tensor keeps `latest_step`, to be told from others of its shape."""
        return False

    def latest_step(self) -> int | None:
        """Return the number of the step or call before now, the same on all ranks; None where the
        ranks may be at different ones."""
        return None

    @abstractmethod
    def count_call(self) -> None:
        """Count the function that this rank is in among what is compared between ranks."""

    @abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """Return what every rank passes, in rank order; all ranks of the grid call it together."""

    @abstractmethod
    def collective(self, kind: str) -> AbstractContextManager[object]:
        """Return a context for a collective of the grid's communicators, compared between ranks."""

    @abstractmethod
    def waiting(self) -> AbstractContextManager[object]:
        """Return a context in which this rank is seen to wait for the other ranks of the grid."""

    def __copy__(self) -> Grid:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Grid:
        return self

    def __repr__(self) -> str:
        return f"ProcessGrid({self.topology}) on {self.size} rank{'s' if self.size > 1 else ''}"
