"""The arguments handed to NCCL: addresses, counts and types, by cupy's documented signatures.

Memory is the CPU's, streams are none, and MPI stands in for NCCL.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from mpi4py import MPI

from distconv.transport.mpi_communicator import MPICommunicator
from distconv.transport.nccl import NCCLTransport, why_unavailable
from tests.support.streams import Stream, replace_modules, replace_streams

WORLD = MPI.COMM_WORLD
ALL = MPICommunicator(WORLD)
RANKS = [1, 2, 3]
TYPES = {0: MPI.INT8_T, 1: MPI.UINT8_T, 2: MPI.INT32_T, 4: MPI.INT64_T, 7: MPI.FLOAT, 8: MPI.DOUBLE}
"""MPI's types by the numbers that NCCL gives them."""


def memory(address: int, count: int, datatype: int) -> list[Any]:
    kind = TYPES[datatype]
    return [MPI.buffer.fromaddress(address, count * kind.Get_size()), count, kind]


class Communicator:
    """A stand-in for cupy's NcclCommunicator, over MPI."""

    group: list[MPI.Request] | None = None
    """The requests started since groupStart."""
    lost = False
    """Whether NCCL has met with an error meanwhile."""

    def __init__(self, ndev: int, commId: tuple[int, ...], rank: int):
        self._comm = WORLD.Dup()
        assert len(commId) == 128 and (ndev, rank) == (WORLD.size, WORLD.rank)

    def check_async_error(self) -> None:
        if Communicator.lost:
            raise RuntimeError("NCCL_ERROR_REMOTE_ERROR")

    def send(self, buffer: int, count: int, datatype: int, peer: int, stream: int) -> None:
        assert Communicator.group is not None and stream == Stream.cuda_stream
        Communicator.group.append(self._comm.Isend(memory(buffer, count, datatype), peer))

    def recv(self, buffer: int, count: int, datatype: int, peer: int, stream: int) -> None:
        assert Communicator.group is not None and stream == Stream.cuda_stream
        Communicator.group.append(self._comm.Irecv(memory(buffer, count, datatype), peer))

    def allReduce(  # noqa: N802
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int
    ) -> None:
        assert (sendbuf, op, stream) == (recvbuf, 0, Stream.cuda_stream)
        self._comm.Allreduce(MPI.IN_PLACE, memory(recvbuf, count, datatype), MPI.SUM)

    def allGather(  # noqa: N802
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int
    ) -> None:
        into = memory(recvbuf, count * WORLD.size, datatype)
        into[1] = count
        self._comm.Allgather(memory(sendbuf, count, datatype), into)

    def broadcast(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int
    ) -> None:
        assert sendbuff == recvbuff
        self._comm.Bcast(memory(recvbuff, count, datatype), root)


def group_start() -> None:
    assert Communicator.group is None
    Communicator.group = []


def group_end() -> None:
    assert Communicator.group is not None
    MPI.Request.Waitall(Communicator.group)
    Communicator.group = None


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Iterator[NCCLTransport]:
    """Make a transport over all ranks."""
    nccl: Any = ModuleType("cupy.cuda.nccl")
    nccl.NcclCommunicator, nccl.groupStart, nccl.groupEnd = Communicator, group_start, group_end
    nccl.get_unique_id = lambda: tuple(range(128))
    nccl.NCCL_SUM = nccl.NCCL_INT8 = 0
    nccl.NCCL_UINT8, nccl.NCCL_INT32, nccl.NCCL_INT64 = 1, 2, 4
    nccl.NCCL_FLOAT32, nccl.NCCL_FLOAT64 = 7, 8
    replace_modules(monkeypatch, ModuleType("cupy"), ModuleType("cupy.cuda"), nccl)
    replace_streams(monkeypatch)
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0")
    yield NCCLTransport(ALL, torch.device("cpu"))
    assert Communicator.group is None


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool])
def test_messages_are_the_bytes_of_tensors(transport: NCCLTransport, dtype: torch.dtype) -> None:
    values = [(torch.arange(5 + i) + WORLD.rank).to(dtype) for i in range(WORLD.size)]
    incoming = [torch.zeros(5 + WORLD.rank, dtype=dtype) for _ in values]
    transport.exchange(list(enumerate(incoming)), list(enumerate(values)), 3).wait()
    for rank, landing in enumerate(incoming):
        assert torch.equal(landing, (torch.arange(5 + WORLD.rank) + rank).to(dtype))


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    ],
)
def test_all_types_are_added_up(transport: NCCLTransport, dtype: torch.dtype) -> None:
    each = [(torch.arange(9) % 4 + r).to(dtype) for r in range(WORLD.size)]
    total = each[WORLD.rank].clone()
    transport.all_reduce(total, ALL).wait()
    wide = dtype if dtype.is_complex else torch.float64
    expected = torch.stack(each).to(wide).sum(0)
    assert torch.equal(total, expected.ne(0) if dtype == torch.bool else expected.to(dtype))


@pytest.mark.parallel([1])
def test_a_type_that_cannot_be_added_up_is_refused(transport: NCCLTransport) -> None:
    with pytest.raises(TypeError, match="NCCL cannot add up torch.uint16"):
        transport.all_reduce(torch.zeros(1, dtype=torch.uint16), ALL)


@pytest.mark.parallel(RANKS)
def test_tensors_are_gathered_and_broadcast(transport: NCCLTransport) -> None:
    gathered = transport.all_gather(torch.full((2, 3), WORLD.rank), ALL)
    assert gathered.shape == (WORLD.size, 2, 3)
    assert gathered[:, 1, 2].tolist() == list(range(WORLD.size))
    value = torch.full((4,), 1.0 + WORLD.rank)
    transport.broadcast(value, ALL)
    assert value.tolist() == [1.0] * 4


@pytest.mark.parallel([1, 2])
def test_an_exception_leaves_no_group_open(transport: NCCLTransport) -> None:
    broken: Any = "no tensor"
    with pytest.raises(AttributeError):
        transport.exchange([], [(0, broken)], 1)
    assert Communicator.group is None
    value = torch.full((4,), 1.0 + WORLD.rank)
    landing = torch.zeros(4)
    transport.exchange([(WORLD.rank, landing)], [(WORLD.rank, value)], 2).wait()
    assert torch.equal(landing, value)


@pytest.mark.parallel([1])
def test_what_nccl_meets_with_is_raised_by_the_next_message(
    transport: NCCLTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport.all_reduce(torch.ones(3), ALL).wait()
    monkeypatch.setattr(Communicator, "lost", True)
    with pytest.raises(RuntimeError, match="REMOTE_ERROR"):
        transport.all_reduce(torch.ones(3), ALL)


@pytest.mark.parallel([1])
@pytest.mark.parametrize(("version", "usable"), [(22512, False), (22602, True), (22900, True)])
def test_versions_of_nccl_are_looked_at(
    transport: NCCLTransport, monkeypatch: pytest.MonkeyPatch, version: int, usable: bool
) -> None:
    from cupy.cuda import nccl

    monkeypatch.setattr(nccl, "available", True, raising=False)
    monkeypatch.setattr(nccl, "get_version", lambda: version, raising=False)
    assert (why_unavailable() is None) is usable
