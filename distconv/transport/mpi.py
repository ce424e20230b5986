"""A carrier and communicators over MPI, which sends tensors from their memory, not pickled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from mpi4py import MPI

from distconv.transport.interface import (
    BufferPool,
    Comparison,
    Message,
    Request,
    Summand,
    tags,
    with_opposites,
)
from distconv.transport.launch import check_is_rank, check_mpi_runs

_ABANDONED: set[MPIRequest] = set()
"""Requests whose `wait` an exception prevented, with the memory that MPI still uses."""


def release_abandoned() -> None:
    """Free the memory of abandoned requests that MPI has completed.

    A request is abandoned if an exception prevents its `wait`. Until it is complete, MPI uses the
    memory of its tensors, even after the grid is deleted.
    """
    for request in tuple(_ABANDONED):
        if MPI.Request.Testall(request.requests):
            _ABANDONED.discard(request)


class MPIRequest:
    """A started exchange or reduction of MPI, with the memory that MPI reads and writes."""

    def __init__(
        self,
        requests: list[MPI.Request],
        memory: Any,
    ):
        self.requests, self._memory = requests, memory

    def wait(self) -> None:
        try:
            for request in self.requests:
                request.Wait()
        except MPI.Exception as error:
            raise RuntimeError(
                f"MPI could not complete the messages of an operator ({error}). If the error "
                "reports a truncated message, the ranks run different operators; DISTCONV_DEBUG=1 "
                "names the first that differs"
            ) from error
        self.requests = []

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        # At exit, Python has already deleted the names of this module.
        if self.requests and not at_exit() and not MPI.Is_finalized():
            _ABANDONED.add(self)


class MPICommunicator:
    """A `Communicator` over mpi4py's `comm`, whose ranks all call each method together."""

    def __init__(self, comm: MPI.Intracomm, purpose: str = "user"):
        self.mpi, self.purpose = comm, purpose
        self.rank, self.size = comm.rank, comm.size
        self.ranks = world_ranks(comm)

    def allgather(self, value: Any) -> list[Any]:
        return self.mpi.allgather(value)

    def bcast(self, value: Any = None) -> Any:
        return self.mpi.bcast(value)

    def compare(self, numbers: Sequence[int]) -> Comparison:
        check_is_rank()
        check_mpi_runs()
        if _ABANDONED:
            release_abandoned()
        most = with_opposites(numbers)
        request = self.mpi.Iallreduce(MPI.IN_PLACE, most, MPI.MAX)
        return Comparison(MPIRequest([request], most).wait, most)

    def subgroup(self, ranks: tuple[int, ...], purpose: str) -> MPICommunicator:
        check_is_rank()
        group = MPI.COMM_WORLD.group.Incl(ranks)
        return MPICommunicator(self.mpi.Create_group(group), purpose)

    def for_program(self) -> MPI.Intracomm:
        return self.mpi


def world_ranks(comm: MPI.Intracomm) -> tuple[int, ...]:
    """Return the numbers of `comm`'s ranks in MPI.COMM_WORLD; raise ValueError if one has none."""
    ranks = MPI.Group.Translate_ranks(comm.group, None, MPI.COMM_WORLD.group)
    if MPI.UNDEFINED in ranks:
        raise ValueError("ProcessGrid: every rank of comm must be a rank of MPI.COMM_WORLD")
    return tuple(ranks)


_DATATYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
}


class MPITransport:
    """A carrier of CPU tensors by MPI, over a communicator `comm` that nothing else uses."""

    name, ordered = "mpi", False

    def __init__(self, comm: MPICommunicator):
        self._comm = comm.mpi
        self.next_tag, self.empty = tags(), BufferPool().empty

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> MPIRequest:
        if MPI.Is_finalized():
            check_mpi_runs()
        if _ABANDONED:
            release_abandoned()
        receive, send, requests = self._comm.Irecv, self._comm.Isend, list[MPI.Request]()
        under_way = MPIRequest(requests, (arriving, leaving))
        for rank, tensor in arriving:
            requests.append(receive(_bytes(tensor), rank, tag))
        for rank, tensor in leaving:
            requests.append(send(_bytes(tensor), rank, tag))
        return under_way

    def all_reduce(self, tensor: torch.Tensor, group: MPICommunicator) -> Request:
        if MPI.Is_finalized():
            check_mpi_runs()
        summand = Summand.of(tensor, "MPI")
        numbers = summand.numbers
        typed = [*_bytes(numbers)[:1], numbers.numel(), _DATATYPES[numbers.dtype]]
        request = group.mpi.Iallreduce(MPI.IN_PLACE, typed, MPI.SUM)
        return summand.arriving(MPIRequest([request], numbers))

    def all_gather(self, tensor: torch.Tensor, group: MPICommunicator) -> torch.Tensor:
        gathered = tensor.new_empty((group.size, *tensor.shape))
        group.mpi.Allgather(_bytes(tensor), _bytes(gathered))
        return gathered

    def broadcast(self, tensor: torch.Tensor, group: MPICommunicator) -> None:
        group.mpi.Bcast(_bytes(tensor), root=0)


def _bytes(tensor: torch.Tensor) -> list[Any]:
    return [_memory(tensor.data_ptr(), tensor.nbytes), MPI.BYTE]


_memory = MPI.buffer.fromaddress
