"""Ranks that MPI has started, as a `Communicator`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distconv.transport.communicator import Comparison, with_opposites
from distconv.transport.launch import mpi
from distconv.transport.mpi_request import MPIRequest, release_abandoned

if TYPE_CHECKING:
    from mpi4py import MPI


class MPICommunicator:
    """A communicator of mpi4py, `mpi`, with the numbers of its ranks in MPI.COMM_WORLD."""

    def __init__(self, comm: MPI.Intracomm, purpose: str = "user"):
        self.mpi, self.purpose = comm, purpose
        self.rank, self.size = comm.rank, comm.size
        self.ranks = world_ranks(comm)

    def allgather(self, value: Any) -> list[Any]:
        """Return what every rank passes, in rank order."""
        return self.mpi.allgather(value)

    def bcast(self, value: Any = None) -> Any:
        """Return what the first rank passes."""
        return self.mpi.bcast(value)

    def all_gather_numbers(self, numbers: Sequence[int]) -> np.ndarray:
        """Return the numbers of every rank, of shape (size, len(numbers)), in 64 bits."""
        together = np.empty((self.size, len(numbers)), dtype=np.int64)
        self.mpi.Allgather(np.array(numbers, dtype=np.int64), together)
        return together

    def compare(self, numbers: Sequence[int]) -> Comparison:
        """Start to compare numbers of fewer than 64 bits with those of the other ranks."""
        release_abandoned()
        most = with_opposites(numbers)
        MPI = mpi()
        request = self.mpi.Iallreduce(MPI.IN_PLACE, most, MPI.MAX)
        return Comparison(MPIRequest([request], most).wait, most)

    def subgroup(self, ranks: tuple[int, ...], purpose: str) -> MPICommunicator:
        """Return a communicator of some of the ranks, in numbers of the job; those call it."""
        group = mpi().COMM_WORLD.group.Incl(ranks)
        return MPICommunicator(self.mpi.Create_group(group), purpose)

    def for_program(self) -> MPI.Intracomm:
        """Return mpi4py's communicator."""
        return self.mpi


def world_ranks(comm: MPI.Intracomm) -> tuple[int, ...]:
    """Return the ranks of `comm` as ranks of MPI.COMM_WORLD; no communication."""
    MPI = mpi()
    ranks = MPI.Group.Translate_ranks(comm.group, None, MPI.COMM_WORLD.group)
    if MPI.UNDEFINED in ranks:
        raise ValueError("ProcessGrid: every rank of comm has to be a rank of MPI.COMM_WORLD")
    return tuple(ranks)
