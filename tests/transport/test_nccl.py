"""The arguments handed to NCCL: addresses, counts and types, by cupy's documented signatures.

Memory is the CPU's, streams are none, and MPI stands in for NCCL.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mpi4py import MPI

from distconv.device.streams import SideStream
from distconv.transport.mpi import MPICommunicator
from distconv.transport.nccl import NCCLTransport
from tests.support.nccl import Communicator, replace_cupy
from tests.support.streams import replace_streams

WORLD = MPI.COMM_WORLD
ALL = MPICommunicator(WORLD)
RANKS = [1, 2, 3]


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Iterator[NCCLTransport]:
    """Make a transport over all ranks."""
    replace_cupy(monkeypatch)
    replace_streams(monkeypatch)
    device = torch.device("cpu")
    yield NCCLTransport(ALL, device, SideStream(device))
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
    with pytest.raises(TypeError, match="NCCL cannot sum torch.uint16"):
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
