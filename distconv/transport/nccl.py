"""Transport over NCCL, by cupy: to the host, starting an exchange is launching one more kernel.

Each communicator of NCCL has a stream of its own, which waits for the current one
before it sends or adds up; the current one waits for it when somebody waits, and the host never.
Messages have no tags: they meet in the order in which ranks start them, the same on all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from distconv.transport.interface import Communicator, Message, Request
from distconv.transport.sums import Summand

_OLDEST = 2, 26
"""The first version of NCCL that can keep the order of the host."""


def why_too_old(version: tuple[int, ...]) -> str | None:
    """Return why a version of NCCL cannot be used; None where it can.

    Kernels of NCCL wait for other ranks. In orders that differ between ranks those of two
    communicators could wait for each other for ever.
    """
    if version >= _OLDEST:
        return None
    found, needed = (".".join(map(str, numbers)) for numbers in (version, _OLDEST))
    return (
        f"NCCL {found} does not start kernels in the order of the host; install {needed} or newer"
    )


def keep_order() -> None:
    """Let NCCL run the kernels of all communicators in the order in which the host starts them.

    It reads the variable when it makes the first communicator of the process.
    """
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")


class StreamRequest:
    """All that a stream beside the current one has been given so far, and the tensors it uses.

    The tensors are held until somebody waits. What the current stream is given then comes later,
    and so does whatever gets their memory. (`record_stream` would do as well, but keeps the memory
    out of use for as long as a graph is captured.)
    """

    def __init__(self, stream: torch.cuda.Stream, tensors: Iterable[Tensor]):
        self._device, self._event = stream.device, stream.record_event()
        self._tensors = tuple(tensors)

    def wait(self) -> None:
        """Let all that follows on the current stream find it complete; the host goes on."""
        torch.cuda.current_stream(self._device).wait_event(self._event)
        self._tensors = ()

    def __del__(self) -> None:
        # An exception may leave messages behind, which are sent and arrive all the same.
        if self._tensors and not sys.is_finalizing():
            self.wait()


class SideStream:
    """A stream of its own, which comes before others where the GPU has to choose."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device, priority=-1)

    @property
    def address(self) -> int:
        """Return the address by which other libraries know the stream."""
        address: int = self.stream.cuda_stream
        return address

    def follow(self) -> None:
        """Go on after all that the current stream has been given so far."""
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def mark(self, tensors: Iterable[Tensor]) -> StreamRequest:
        """Return a request for all that this stream has been given so far, which uses `tensors`."""
        return StreamRequest(self.stream, tensors)


_TYPES = {
    torch.float32: "NCCL_FLOAT32",
    torch.float64: "NCCL_FLOAT64",
    torch.int8: "NCCL_INT8",
    torch.uint8: "NCCL_UINT8",
    torch.int32: "NCCL_INT32",
    torch.int64: "NCCL_INT64",
}


def why_unavailable() -> str | None:
    """Return why this process cannot use NCCL; None where it can."""
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        return f"cupy is missing ({error}); install cupy-cuda13x, or -cuda12x for CUDA 12"
    if not nccl.available:
        return "cupy finds no NCCL; install nvidia-nccl-cu13, or -cu12"
    major, rest = divmod(nccl.get_version(), 10_000)
    return why_too_old((major, rest // 100, rest % 100))


class _StreamCommunicator(SideStream):
    """A communicator of NCCL, and its stream."""

    def follow(self) -> None:
        """Go on after all that the current stream has been given so far.

        Raises what NCCL has met with since the last time, such as a lost connection.
        """
        self.comm.check_async_error()
        super().follow()

    def __init__(self, group: Communicator, device: torch.device):
        from cupy.cuda import nccl

        super().__init__(device)
        name = group.bcast(nccl.get_unique_id() if group.rank == 0 else None)
        with torch.cuda.device(device):
            self.comm: Any = nccl.NcclCommunicator(group.size, name, group.rank)


class NCCLTransport:
    """Messages between GPUs of which each belongs to one rank; see `Transport`."""

    name, ordered = "nccl", True

    def __init__(self, comm: Communicator, device: torch.device):
        from cupy.cuda import nccl

        keep_order()
        self._nccl, self._device = nccl, device
        self._messages = _StreamCommunicator(comm, device)
        self._groups: dict[tuple[str, tuple[int, ...]], _StreamCommunicator] = {}

    def check(self) -> None:
        """Raise what NCCL has met with, such as a lost connection."""
        for channel in (self._messages, *self._groups.copy().values()):
            channel.comm.check_async_error()

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
        try:
            for rank, t in arriving:
                comm.recv(t.data_ptr(), t.nbytes, nccl.NCCL_UINT8, rank, stream)
            for rank, t in leaving:
                comm.send(t.data_ptr(), t.nbytes, nccl.NCCL_UINT8, rank, stream)
        finally:
            nccl.groupEnd()  # an open group would take in all that comes later
        return self._messages.mark(tensor for _, tensor in (*arriving, *leaving))

    def all_reduce(self, tensor: Tensor, group: Communicator) -> Request:
        """Start adding up a tensor in place over the ranks of `group`."""
        summand = Summand.of(tensor, "NCCL")
        numbers = summand.numbers
        nccl, channel, address = self._nccl, self._channel(group), numbers.data_ptr()
        what = numbers.numel(), getattr(nccl, _TYPES[numbers.dtype]), nccl.NCCL_SUM
        channel.follow()
        channel.comm.allReduce(address, address, *what, channel.address)
        return summand.arriving(channel.mark([numbers]))

    def all_gather(self, tensor: Tensor, group: Communicator) -> Tensor:
        """Return the tensors of all ranks of `group`, stacked in rank order."""
        gathered = tensor.new_empty((group.size, *tensor.shape))
        nccl, channel = self._nccl, self._channel(group)
        channel.follow()
        addresses = tensor.data_ptr(), gathered.data_ptr()
        channel.comm.allGather(*addresses, tensor.nbytes, nccl.NCCL_UINT8, channel.address)
        channel.mark([tensor, gathered]).wait()
        return gathered

    def broadcast(self, tensor: Tensor, group: Communicator) -> None:
        """Overwrite a tensor by the one of the first rank of `group`."""
        nccl, channel, address = self._nccl, self._channel(group), tensor.data_ptr()
        channel.follow()
        what = tensor.nbytes, nccl.NCCL_UINT8, 0, channel.address
        channel.comm.broadcast(address, address, *what)
        channel.mark([tensor]).wait()

    def _channel(self, group: Communicator) -> _StreamCommunicator:
        """Return the NCCL communicator of `group`, which its ranks make together at first need."""
        key = group.purpose, group.ranks
        if key not in self._groups:
            self._groups[key] = _StreamCommunicator(group, self._device)
        return self._groups[key]
