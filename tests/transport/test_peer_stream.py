"""What is handed to CUDA, by the signatures that cupy and cuda-bindings document.

Memory is shared by MPI, streams are done at once: a rank stands still where its GPU would.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

import distconv as dc
from distconv.transport import ipc
from distconv.transport.mpi import MPITransport
from distconv.transport.peer import PeerTransport, connect
from distconv.transport.semaphores import DriverSemaphores, KernelSemaphores, make_semaphores
from tests.support.serial import deviation
from tests.support.streams import Stream, replace_modules, replace_streams

WORLD = MPI.COMM_WORLD
RANKS = [1, 2, 3, 4]
OUT_OF_REACH: set[int] = set()
"""Ranks whose memory this one cannot open."""
NOT_SHARED: set[int] = set()
"""Ranks whose memory nobody can."""


class Runtime(ModuleType):
    """cupy.cuda.runtime over the memory of CPUs."""

    memcpyHostToDevice, memcpyDefault, cudaIpcMemLazyEnablePeerAccess = 1, 4, 1  # noqa: N815

    class CUDARuntimeError(RuntimeError):
        pass

    def malloc(self, size: int) -> int:
        assert size % 2**21 == 0
        # Alike on all ranks, which allocate together.
        self._window = MPI.Win.Allocate_shared(size, comm=WORLD)
        self._window.Lock_all()
        return self._address(WORLD.rank)

    def _address(self, rank: int) -> int:
        address: int = self._window.Shared_query(rank)[0].address
        return address

    def memcpy(self, dst: int, src: int, size: int, kind: int) -> None:
        assert kind == self.memcpyHostToDevice
        ctypes.memmove(dst, src, size)

    def deviceSynchronize(self) -> None:  # noqa: N802
        self._window.Sync()

    def ipcGetMemHandle(self, ptr: int) -> bytes:  # noqa: N802
        assert ptr == self._address(WORLD.rank)
        if WORLD.rank in NOT_SHARED:
            raise self.CUDARuntimeError("operation not supported")
        return bytes([WORLD.rank])

    def ipcOpenMemHandle(self, handle: bytes, flags: int) -> int:  # noqa: N802
        assert flags == self.cudaIpcMemLazyEnablePeerAccess and handle[0] != WORLD.rank
        if handle[0] in OUT_OF_REACH:
            raise self.CUDARuntimeError("peer access is not supported")
        return self._address(handle[0])

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:  # noqa: N802
        assert (kind, stream) == (self.memcpyDefault, Stream.cuda_stream) and size
        ctypes.memmove(dst, src, size)


def wait_for(address: int, value: int) -> None:
    while ctypes.c_uint32.from_address(address).value != value:
        time.sleep(1e-6)


class Driver(ModuleType):
    """cuda.bindings.driver: what a stream would wait for, the process waits for."""

    class CUresult:
        CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE = 0, 1

    class CUstreamWaitValue_flags:  # noqa: N801
        CU_STREAM_WAIT_VALUE_GEQ, CU_STREAM_WAIT_VALUE_EQ = 0, 1
        CU_STREAM_WAIT_VALUE_FLUSH = 2**30

    class CUdevice_attribute:  # noqa: N801
        CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES = 98

    can_flush = 0

    def cuCtxGetDevice(self) -> tuple[int, int]:  # noqa: N802
        return self.CUresult.CUDA_SUCCESS, 3

    def cuDeviceGetAttribute(self, attrib: int, dev: int) -> tuple[int, int]:  # noqa: N802
        assert (attrib, dev) == (98, 3)
        return self.CUresult.CUDA_SUCCESS, self.can_flush

    def cuStreamWaitValue32(  # noqa: N802
        self, stream: int, addr: int, value: int, flags: int
    ) -> tuple[int]:
        assert (stream, flags) == (Stream.cuda_stream, 1 + 2**30 * self.can_flush)
        if not addr:
            return (self.CUresult.CUDA_ERROR_INVALID_VALUE,)
        wait_for(addr, value)
        return (self.CUresult.CUDA_SUCCESS,)

    def cuStreamWriteValue32(  # noqa: N802
        self, stream: int, addr: int, value: int, flags: int
    ) -> tuple[int]:
        assert (stream, flags) == (Stream.cuda_stream, 0)
        ctypes.c_uint32.from_address(addr).value = value
        return (self.CUresult.CUDA_SUCCESS,)


class RawModule:
    """cupy.RawModule, of the two kernels that there are."""

    def __init__(self, code: str):
        assert 'extern "C" __global__ void acquire(' in code

    def get_function(self, name: str) -> Callable[..., None]:
        def kernel(grid: tuple[int], block: tuple[int], args: tuple[int]) -> None:
            assert grid == block == (1,)
            if name == "acquire":
                wait_for(args[0], 1)
            ctypes.c_uint32.from_address(args[0]).value = int(name == "release")

        return kernel


class ExternalStream:
    """cupy.cuda.ExternalStream."""

    def __init__(self, address: int):
        assert address == Stream.cuda_stream

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture(params=[DriverSemaphores, KernelSemaphores])
def libraries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """cupy, with or without cuda-bindings."""
    cupy: Any = ModuleType("cupy")
    cuda: Any = ModuleType("cupy.cuda")
    cupy.RawModule, cuda.ExternalStream = RawModule, ExternalStream
    replace_modules(monkeypatch, cupy, cuda, Runtime("cupy.cuda.runtime"))
    if request.param is DriverSemaphores:
        bindings = map(ModuleType, ("cuda", "cuda.bindings"))
        replace_modules(monkeypatch, *bindings, Driver("cuda.bindings.driver"))
    else:
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    replace_streams(monkeypatch)
    assert type(make_semaphores()) is request.param
    yield
    OUT_OF_REACH.clear()
    NOT_SHARED.clear()


def transport() -> PeerTransport:
    return connect(WORLD, torch.device("cpu"), MPITransport(WORLD.Dup()))


@pytest.mark.parallel(RANKS)
def test_messages_cross_the_memory_of_ranks(libraries: None) -> None:
    peer = transport()
    assert peer.name == "peer"
    for i in range(5):
        values = [torch.full((1000 + 100 * r,), 10.0 * i + WORLD.rank) for r in range(WORLD.size)]
        incoming = [torch.zeros(1000 + 100 * WORLD.rank) for _ in values]
        peer.exchange(list(enumerate(incoming)), list(enumerate(values)), 3).wait()
        assert all(landing.eq(10 * i + r).all() for r, landing in enumerate(incoming))
    total = torch.full((100_000,), 1.0 + WORLD.rank)
    peer.all_reduce(total, WORLD).wait()
    assert total.eq(sum(range(WORLD.size + 1))).all()


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("shared", [False, True])
def test_ranks_out_of_reach_get_their_messages_by_mpi(libraries: None, shared: bool) -> None:
    if WORLD.rank == 0:
        (OUT_OF_REACH if shared else NOT_SHARED).add(WORLD.size - 1 if shared else 0)
    peer = transport()
    assert peer.name == "peer and mpi"
    incoming = [torch.zeros(10) for _ in range(WORLD.size)]
    leaving = [(r, torch.full((10,), 1.0 + WORLD.rank)) for r in range(WORLD.size)]
    peer.exchange(list(enumerate(incoming)), leaving, peer.next_tag()).wait()
    assert [int(landing[0]) for landing in incoming] == list(range(1, WORLD.size + 1))


@pytest.mark.parallel([1])
def test_what_the_driver_refuses_is_an_error(libraries: None) -> None:
    by = make_semaphores()
    if isinstance(by, DriverSemaphores):
        with pytest.raises(RuntimeError, match="operation on memory of a GPU failed"):
            by.acquire(Stream.cuda_stream, 0)


@pytest.mark.parallel([1])
def test_gpus_that_can_flush_what_others_have_written_do_so(
    libraries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Driver, "can_flush", 1)
    semaphore = ctypes.c_uint32(1)
    make_semaphores().acquire(Stream.cuda_stream, ctypes.addressof(semaphore))
    assert not semaphore.value


@pytest.mark.parallel(RANKS)
def test_memory_begins_as_it_is_asked_to(libraries: None) -> None:
    bases = ipc.share_memory(WORLD, 3 * 2**20, [5, 6, 7 + WORLD.rank])
    WORLD.Barrier()
    for rank, base in enumerate(bases):
        assert base is not None
        assert list((ctypes.c_uint32 * 3).from_address(base)) == [5, 6, 7 + rank]


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("method", ["overlapped", "assembled"])
def test_a_step_equals_that_of_serial_torch(
    libraries: None, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = dc.ProcessGrid(height=-1)
    monkeypatch.setattr(grid, "_transport", transport())
    torch.manual_seed(0)
    serial = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 6, 5, padding=2, padding_mode="circular"),
        nn.ConvTranspose2d(6, 4, 2, 2),
    ).double()
    x, y = torch.randn(2, 3, 20, 12).double(), torch.randn(2, 4, 20, 12).double()
    expected = step(serial, x, y)
    model = dc.parallelize(serial, grid, bucket_bytes=512)
    model.zero_grad()
    with dc.method(method):
        found = step(model, *(dc.distribute_tensor(t, grid) for t in (x, y)))
    assert all(deviation(a, b) < 1e-10 for a, b in zip(found, expected, strict=True))


def step(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    F.mse_loss(model(x), y).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]
