"""Transport over MPI: tensor memory handed to MPI as it is, without pickling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from mpi4py import MPI

from distconv.transport.buffers import BufferPool
from distconv.transport.interface import SUM_TYPES, Message
from distconv.transport.mpi_communicator import MPICommunicator

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


class Abandoned:
    """Requests that nobody waits for any more, with the memory that MPI still works on.

    An exception between the start and the end of an exchange leaves such requests behind. Their
    memory must not be used for anything else until MPI is done with it.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[list[MPI.Request], Any]] = []

    def keep(self, requests: list[MPI.Request], memory: Any) -> None:
        """Hold `memory` until the requests are complete."""
        self._kept.append((requests, memory))

    def release(self) -> None:
        """Let go of the requests that have completed, and of their memory."""
        if self._kept:
            self._kept = [kept for kept in self._kept if not MPI.Request.Testall(kept[0])]


class MPIRequest:
    """Messages or a reduction under way; it keeps the memory alive that MPI works on.

    Parameters
    ----------
    memory: the tensors that MPI reads and writes.
    finish: is called when all is complete, for a reduction in memory of its own.
    """

    def __init__(
        self,
        requests: list[MPI.Request],
        memory: Any,
        abandoned: Abandoned,
        finish: Callable[[], object] | None = None,
    ):
        self.requests, self._memory = requests, memory
        self._abandoned, self._finish = abandoned, finish

    def wait(self) -> None:
        """Return when all has arrived, and what was sent may be overwritten."""
        try:
            for request in self.requests:
                request.Wait()
        except MPI.Exception as error:
            raise RuntimeError(
                f"MPI could not complete the messages of an operator ({error}). Where it says that "
                "a message is truncated, the ranks run different operators; DISTCONV_DEBUG=1 names "
                "the first that differs"
            ) from error
        self.requests = []
        if self._finish is not None:
            self._finish()

    def __del__(self) -> None:
        if self.requests and not MPI.Is_finalized():
            self._abandoned.keep(self.requests, self._memory)


class MPITransport:
    """Messages over one communicator, which nothing else uses; see `Transport`."""

    name, ordered = "mpi", False

    def __init__(self, comm: MPICommunicator):
        self._comm = comm.mpi
        bound = comm.mpi.Get_attr(MPI.TAG_UB)
        self._tags = bound if isinstance(bound, int) else 32767
        self._last_tag = 0
        self._buffers = BufferPool()
        self._abandoned = Abandoned()

    def next_tag(self) -> int:
        """Return the tag of the next exchange."""
        self._last_tag = (self._last_tag + 1) % self._tags
        return self._last_tag

    def empty(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Return uninitialised memory for a message, of the type of `like`."""
        return self._buffers.empty(shape, like)

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> MPIRequest:
        """Start the messages of one exchange."""
        comm = self._comm
        self._abandoned.release()
        under_way = MPIRequest([], (arriving, leaving), self._abandoned)
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
            return MPIRequest([request], tensor, self._abandoned)
        if tensor.dtype not in SUM_TYPES:
            raise TypeError(
                f"MPI cannot add up {tensor.dtype}; convert to one that it can, x.float()"
            )
        wide = tensor.to(SUM_TYPES[tensor.dtype])
        request = group.mpi.Iallreduce(MPI.IN_PLACE, _typed(wide), MPI.SUM)
        return MPIRequest([request], wide, self._abandoned, lambda: tensor.copy_(wide))

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
