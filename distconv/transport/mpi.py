"""Transport over MPI: tensor memory handed to MPI as it is, without pickling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI

from distconv.transport.buffers import BufferPool
from distconv.transport.interface import SUM_TYPES, Message
from distconv.transport.mpi_communicator import MPICommunicator
from distconv.transport.mpi_request import MPIRequest, release_abandoned
from distconv.transport.tags import Tags

_DATATYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}


class MPITransport:
    """Messages over one communicator, which nothing else uses; see `Transport`."""

    name, ordered = "mpi", False

    def __init__(self, comm: MPICommunicator):
        self._comm = comm.mpi
        self._tags = Tags()
        self._buffers = BufferPool()

    def next_tag(self) -> int:
        """Return the tag of the next exchange."""
        return self._tags.next()

    def empty(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Return uninitialised memory for a message, of the type of `like`."""
        return self._buffers.empty(shape, like)

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> MPIRequest:
        """Start the messages of one exchange."""
        comm = self._comm
        release_abandoned()
        under_way = MPIRequest([], (arriving, leaving))
        requests = under_way.requests
        for rank, tensor in arriving:
            requests.append(comm.Irecv(_bytes(tensor), rank, tag))
        for rank, tensor in leaving:
            requests.append(comm.Isend(_bytes(tensor), rank, tag))
        return under_way

    def all_reduce(self, tensor: torch.Tensor, group: MPICommunicator) -> MPIRequest:
        """Start adding up a tensor in place over the ranks of `group`."""
        if tensor.dtype in _DATATYPES:
            request = group.mpi.Iallreduce(MPI.IN_PLACE, _typed(tensor), MPI.SUM)
            return MPIRequest([request], tensor)
        if tensor.dtype not in SUM_TYPES:
            raise TypeError(
                f"MPI cannot add up {tensor.dtype}; convert to one that it can, x.float()"
            )
        wide = tensor.to(SUM_TYPES[tensor.dtype])
        request = group.mpi.Iallreduce(MPI.IN_PLACE, _typed(wide), MPI.SUM)
        return MPIRequest([request], wide, lambda: tensor.copy_(wide))

    def all_gather(self, tensor: torch.Tensor, group: MPICommunicator) -> torch.Tensor:
        """Return the tensors of all ranks of `group`, stacked in rank order."""
        gathered = tensor.new_empty((group.size, *tensor.shape))
        group.mpi.Allgather(_bytes(tensor), _bytes(gathered))
        return gathered

    def broadcast(self, tensor: torch.Tensor, group: MPICommunicator) -> None:
        """Overwrite a tensor by the one of the first rank of `group`."""
        group.mpi.Bcast(_bytes(tensor), root=0)


def _memory(tensor: torch.Tensor) -> MPI.buffer:
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def _bytes(tensor: torch.Tensor) -> list[Any]:
    return [_memory(tensor), MPI.BYTE]


def _typed(tensor: torch.Tensor) -> list[Any]:
    return [_memory(tensor), tensor.numel(), _DATATYPES[tensor.dtype]]
