"""Transport over MPI: tensor memory handed to MPI as it is, without pickling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI

from distconv.transport import WIDER, Message
from distconv.transport.buffers import Buffers

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


class MPIMessages:
    """Messages under way; it keeps the memory alive that MPI works on."""

    def __init__(self, requests: list[MPI.Request], *messages: Sequence[Message]):
        self._requests = requests
        self._messages = messages

    def wait(self) -> None:
        """Return when all have arrived, and what was sent may be overwritten."""
        for request in self._requests:
            request.Wait()


class MPIReduction:
    """A reduction under way, in memory of its own where MPI does not add up the type itself."""

    def __init__(
        self, request: MPI.Request, buffer: torch.Tensor, into: torch.Tensor | None = None
    ):
        self._request = request
        self._buffer = buffer
        self._into = into

    def wait(self) -> None:
        """Return when it is complete and its tensor may be used."""
        self._request.Wait()
        if self._into is not None:
            self._into.copy_(self._buffer)


class MPITransport:
    """Messages over one communicator, which nothing else uses; see `Transport`."""

    name = "mpi"

    def __init__(self, comm: MPI.Intracomm):
        self._comm = comm
        bound = comm.Get_attr(MPI.TAG_UB)
        self._tags = bound if isinstance(bound, int) else 32767
        self._tickets = 0
        self._buffers = Buffers()

    def ticket(self) -> int:
        """The tag of the next exchange."""
        self._tickets = (self._tickets + 1) % self._tags
        return self._tickets

    def empty(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Memory for a message."""
        return self._buffers.empty(shape, like)

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> MPIMessages:
        """Start the messages of one exchange."""
        comm = self._comm
        requests = [comm.Irecv(_bytes(tensor), rank, tag) for rank, tensor in arriving]
        requests += [comm.Isend(_bytes(tensor), rank, tag) for rank, tensor in leaving]
        return MPIMessages(requests, arriving, leaving)

    def all_reduce(self, tensor: torch.Tensor, group: MPI.Intracomm) -> MPIReduction:
        """Start adding up a tensor in place over the ranks of `group`."""
        if tensor.dtype in _DATATYPES:
            return MPIReduction(group.Iallreduce(MPI.IN_PLACE, _typed(tensor), MPI.SUM), tensor)
        if tensor.dtype not in WIDER:
            raise TypeError(
                f"MPI cannot add up {tensor.dtype}; convert to one that it can, x.float()"
            )
        wide = tensor.to(WIDER[tensor.dtype])
        return MPIReduction(group.Iallreduce(MPI.IN_PLACE, _typed(wide), MPI.SUM), wide, tensor)

    def all_gather(self, tensor: torch.Tensor, group: MPI.Intracomm) -> torch.Tensor:
        """The tensors of all ranks of `group`, stacked in rank order."""
        gathered = tensor.new_empty((group.size, *tensor.shape))
        group.Allgather(_bytes(tensor), _bytes(gathered))
        return gathered

    def broadcast(self, tensor: torch.Tensor, group: MPI.Intracomm) -> None:
        """Overwrite a tensor by that of the first rank of `group`."""
        group.Bcast(_bytes(tensor), root=0)


def _memory(tensor: torch.Tensor) -> MPI.buffer:
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def _bytes(tensor: torch.Tensor) -> list[Any]:
    return [_memory(tensor), MPI.BYTE]


def _typed(tensor: torch.Tensor) -> list[Any]:
    return [_memory(tensor), tensor.numel(), _DATATYPES[tensor.dtype]]
