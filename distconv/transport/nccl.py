"""Transport over NCCL, by cupy: to the host, starting an exchange is launching one more kernel.

Communicators are made through MPI. Each has a stream of its own, which waits for the current one
before it sends or adds up; the current one waits for it when somebody waits, and the host never.
Messages have no tags: they meet in the order in which ranks start them, the same on all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distconv.transport.interface import SUM_TYPES, Message, Request
from distconv.transport.side_stream import SideStream, StreamRequest

if TYPE_CHECKING:
    from mpi4py import MPI

_TYPES = {
    torch.float32: "NCCL_FLOAT32",
    torch.float64: "NCCL_FLOAT64",
    torch.int8: "NCCL_INT8",
    torch.uint8: "NCCL_UINT8",
    torch.int32: "NCCL_INT32",
    torch.int64: "NCCL_INT64",
}
_WIDER = SUM_TYPES | {torch.int16: torch.int32}


def why_unavailable() -> str | None:
    """Return why this process cannot use NCCL; None where it can."""
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        return f"cupy is missing ({error}); install cupy-cuda12x or cupy-cuda13x"
    return None if nccl.available else "cupy finds no NCCL; install nvidia-nccl-cu12 or -cu13"


class _WideSum:
    """A reduction under way in memory of its own, of a type that NCCL does not add up itself."""

    def __init__(self, request: StreamRequest, total: Tensor, into: Tensor):
        self._request, self._total, self._into = request, total, into

    def wait(self) -> None:
        """Let what follows on the current stream find it complete."""
        self._request.wait()
        self._into.copy_(self._total)


class _StreamCommunicator(SideStream):
    """A communicator of NCCL, and its stream."""

    def __init__(self, group: MPI.Intracomm, device: torch.device):
        from cupy.cuda import nccl

        super().__init__(device)
        name = group.bcast(nccl.get_unique_id() if group.rank == 0 else None)
        with torch.cuda.device(device):
            self.comm: Any = nccl.NcclCommunicator(group.size, name, group.rank)


class NCCLTransport:
    """Messages between GPUs of which each belongs to one rank; see `Transport`."""

    name = "nccl"

    def __init__(self, comm: MPI.Intracomm, device: torch.device):
        from cupy.cuda import nccl

        # Kernels of several communicators, which wait for other ranks, run in the host's order: in
        # others they could wait for each other. NCCL 2.26 and newer.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        self._nccl, self._device = nccl, device
        self._messages = _StreamCommunicator(comm, device)
        self._groups: dict[int, _StreamCommunicator] = {}

    def next_tag(self) -> int:
        """Return 0, since messages of NCCL carry no tag."""
        return 0

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return uninitialised memory for a message; torch keeps enough of it for later."""
        return like.new_empty(shape)

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        """Start the messages of one exchange, in one kernel."""
        nccl, comm = self._nccl, self._messages.comm
        self._messages.follow()
        stream = self._messages.address
        nccl.groupStart()
        for rank, t in arriving:
            comm.recv(t.data_ptr(), t.nbytes, nccl.NCCL_UINT8, rank, stream)
        for rank, t in leaving:
            comm.send(t.data_ptr(), t.nbytes, nccl.NCCL_UINT8, rank, stream)
        nccl.groupEnd()
        return self._messages.mark(tensor for _, tensor in (*arriving, *leaving))

    def all_reduce(self, tensor: Tensor, group: MPI.Intracomm) -> Request:
        """Start adding up a tensor in place over the ranks of `group`."""
        if tensor.dtype in _WIDER:
            wide = tensor.to(_WIDER[tensor.dtype])
            return _WideSum(self._add_up(wide, group), wide, tensor)
        return self._add_up(tensor, group)

    def _add_up(self, tensor: Tensor, group: MPI.Intracomm) -> StreamRequest:
        numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if numbers.dtype not in _TYPES:
            raise TypeError(
                f"NCCL cannot add up {tensor.dtype}; convert to one that it can, x.float()"
            )
        nccl, channel, address = self._nccl, self._channel(group), numbers.data_ptr()
        what = numbers.numel(), getattr(nccl, _TYPES[numbers.dtype]), nccl.NCCL_SUM
        channel.follow()
        channel.comm.allReduce(address, address, *what, channel.address)
        return channel.mark([tensor])

    def all_gather(self, tensor: Tensor, group: MPI.Intracomm) -> Tensor:
        """Return the tensors of all ranks of `group`, stacked in rank order."""
        gathered = tensor.new_empty((group.size, *tensor.shape))
        nccl, channel = self._nccl, self._channel(group)
        channel.follow()
        addresses = tensor.data_ptr(), gathered.data_ptr()
        channel.comm.allGather(*addresses, tensor.nbytes, nccl.NCCL_UINT8, channel.address)
        channel.mark([tensor, gathered]).wait()
        return gathered

    def broadcast(self, tensor: Tensor, group: MPI.Intracomm) -> None:
        """Overwrite a tensor by the one of the first rank of `group`."""
        nccl, channel, address = self._nccl, self._channel(group), tensor.data_ptr()
        channel.follow()
        what = tensor.nbytes, nccl.NCCL_UINT8, 0, channel.address
        channel.comm.broadcast(address, address, *what)
        channel.mark([tensor]).wait()

    def _channel(self, group: MPI.Intracomm) -> _StreamCommunicator:
        """Return the NCCL communicator of `group`, which its ranks make together at first need."""
        if group.handle not in self._groups:
            self._groups[group.handle] = _StreamCommunicator(group, self._device)
        return self._groups[group.handle]
