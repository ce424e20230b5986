"""NCCL by cupy and by torch, with the signatures of both, for tensors in the memory of a CPU.

MPI stands in for NCCL: messages have arrived when the call that starts them returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

from tests.support.streams import Stream, replace_modules

WORLD = MPI.COMM_WORLD
TYPES = {0: MPI.INT8_T, 1: MPI.UINT8_T, 2: MPI.INT32_T, 4: MPI.INT64_T, 7: MPI.FLOAT, 8: MPI.DOUBLE}
"""MPI's types by the numbers that NCCL gives them."""
NUMBERS = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float32: 7,
    torch.float64: 8,
}
"""The numbers that NCCL gives to types."""
Memory: TypeAlias = list[Any]
"""A buffer as MPI takes it: the bytes, the number of elements, and their type."""


def memory(address: int, count: int, datatype: int) -> Memory:
    """Return the buffer of so many elements."""
    kind = TYPES[datatype]
    return [MPI.buffer.fromaddress(address, count * kind.Get_size()), count, kind]


class Group:
    """All that is started between groupStart and groupEnd: one kernel."""

    def __init__(self) -> None:
        self.requests: list[MPI.Request] = []
        self.reads: list[Memory] = []
        self.writes: list[Memory] = []
        self.stream = 0


class Communicator:
    """A stand-in for cupy's NcclCommunicator, over MPI; of all ranks, or of one."""

    group: Group | None = None
    lost = False
    """Whether NCCL has met with an error meanwhile."""

    def __init__(self, ndev: int, commId: tuple[int, ...], rank: int):
        self._comm = (MPI.COMM_SELF if ndev == 1 else WORLD).Dup()
        assert len(commId) == 128 and (ndev, rank) == (self._comm.size, self._comm.rank)

    @staticmethod
    def launched(stream: int, reads: Sequence[Memory], writes: Sequence[Memory]) -> None:
        """Look at the stream of a kernel, and at the memory that it reads and writes."""
        assert stream == Stream.native_handle

    def check_async_error(self) -> None:
        if Communicator.lost:
            raise RuntimeError("NCCL_ERROR_REMOTE_ERROR")

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        group, leaving = Communicator.group, memory(sendbuf, count, datatype)
        assert group is not None
        group.stream = stream
        group.reads.append(leaving)
        group.requests.append(self._comm.Isend(leaving, peer))

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        group, landing = Communicator.group, memory(recvbuf, count, datatype)
        assert group is not None
        group.stream = stream
        group.writes.append(landing)
        group.requests.append(self._comm.Irecv(landing, peer))

    def allReduce(  # noqa: N802
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int
    ) -> None:
        assert (sendbuf, op) == (recvbuf, 0)
        into = memory(recvbuf, count, datatype)
        self.launched(stream, [], [into])
        self._comm.Allreduce(MPI.IN_PLACE, into, MPI.SUM)

    def allGather(  # noqa: N802
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int
    ) -> None:
        mine, into = (
            memory(sendbuf, count, datatype),
            memory(recvbuf, count * self._comm.size, datatype),
        )
        self.launched(stream, [mine], [into])
        self._comm.Allgather(mine, [into[0], count, into[2]])

    def broadcast(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int
    ) -> None:
        assert sendbuff == recvbuff
        into = memory(recvbuff, count, datatype)
        self.launched(stream, [], [into])
        self._comm.Bcast(into, root)

    def destroy(self) -> None: ...

    def abort(self) -> None: ...


def group_start() -> None:
    assert Communicator.group is None
    Communicator.group = Group()


def group_end() -> None:
    group, Communicator.group = Communicator.group, None
    assert group is not None
    if group.requests:
        Communicator.launched(group.stream, group.reads, group.writes)
    MPI.Request.Waitall(group.requests)


class Work:
    """What a process group of torch by NCCL returns: only the current stream waits for it."""

    def __init__(self, stream: torch.Stream, tensors: Sequence[Tensor]):
        self._event, self._tensors = stream.record_event(), tensors

    def wait(self) -> None:
        torch.accelerator.current_stream().wait_event(self._event)
        self._tensors = ()


class ProcessGroup:
    """A stand-in for torch's ProcessGroupNCCL, of all ranks; all it is given runs on its stream."""

    error = SimpleNamespace(name="SUCCESS")
    """What the thread has found that watches NCCL."""

    def __init__(self, *_: Any) -> None:
        self._stream = torch.Stream(device="cpu")
        self._kernels = Communicator(WORLD.size, tuple(range(128)), WORLD.rank)
        self._batch: list[Tensor] = []

    def get_error(self) -> SimpleNamespace:
        return self.error

    def shutdown(self) -> None: ...

    def abort(self) -> None: ...

    def _start_coalescing(self) -> None:
        self._follow()
        group_start()

    def _end_coalescing(self) -> Work:
        assert self._batch, "NCCL takes no empty batch"
        group_end()
        tensors, self._batch = self._batch, []
        return Work(self._stream, tensors)

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> None:
        self._kernels.send(*self._message(*tensors), dstRank, self._stream.native_handle)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> None:
        self._kernels.recv(*self._message(*tensors), srcRank, self._stream.native_handle)

    def allreduce(self, tensor: Tensor) -> Work:
        self._follow()
        address, kind = tensor.data_ptr(), NUMBERS[tensor.dtype]
        what = tensor.numel(), kind, 0, self._stream.native_handle
        self._kernels.allReduce(address, address, *what)
        return Work(self._stream, [tensor])

    def _allgather_base(self, output: Tensor, input: Tensor) -> Work:
        self._follow()
        address, *what = self._bytes(input)
        self._kernels.allGather(address, output.data_ptr(), *what, self._stream.native_handle)
        return Work(self._stream, [output, input])

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        self._follow()
        address, *what = self._bytes(tensor)
        self._kernels.broadcast(address, address, *what, root, self._stream.native_handle)
        return Work(self._stream, [tensor])

    def _follow(self) -> None:
        self._stream.wait_stream(torch.accelerator.current_stream())

    def _message(self, tensor: Tensor) -> tuple[int, int, int]:
        assert tensor.numel()
        self._batch.append(tensor)
        return self._bytes(tensor)

    def _bytes(self, tensor: Tensor) -> tuple[int, int, int]:
        assert tensor.dtype == torch.uint8
        return tensor.data_ptr(), tensor.numel(), NUMBERS[torch.uint8]


def replace_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `from cupy.cuda import nccl` find these bindings."""
    nccl: Any = ModuleType("cupy.cuda.nccl")
    nccl.NcclCommunicator, nccl.groupStart, nccl.groupEnd = Communicator, group_start, group_end
    nccl.get_unique_id = lambda: tuple(range(128))
    nccl.NCCL_SUM = nccl.NCCL_INT8 = 0
    nccl.NCCL_UINT8, nccl.NCCL_INT32, nccl.NCCL_INT64 = 1, 2, 4
    nccl.NCCL_FLOAT32, nccl.NCCL_FLOAT64 = 7, 8
    replace_modules(monkeypatch, ModuleType("cupy"), ModuleType("cupy.cuda"), nccl)
