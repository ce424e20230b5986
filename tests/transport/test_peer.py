"""Ranks that write into each other's memory get what was sent, and add up alike on all ranks.

Lanes are threads that do their work late (`lanes.py`), between processes that share memory.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI

import distconv as dc
from distconv.transport.peer import PeerTransport
from tests.support.lanes import connected

WORLD = MPI.COMM_WORLD
RANKS = [1, 2, 3, 4]
LATE = 1e-3


def halves() -> list[frozenset[int]]:
    """Ranks that reach only those beside them, and one of which is reached but does not reach."""
    reached = [{r, r ^ 1} & set(range(WORLD.size)) for r in range(WORLD.size)]
    reached[-1].add(0)
    return [frozenset(one) for one in reached]


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("apart", [False, True])
def test_messages_arrive_however_late_ranks_are(apart: bool) -> None:
    transport = connected(1000, halves() if apart else None, LATE)
    assert transport.name == ("peer and mpi" if apart and WORLD.size > 2 else "peer")
    rng, mine = random.Random(0), random.Random(WORLD.rank)
    for i in range(20):
        flights = []
        for _ in range(3):
            sizes = [[rng.randrange(3000) for _ in range(WORLD.size)] for _ in range(WORLD.size)]
            arriving = [(r, torch.empty(sizes[r][WORLD.rank])) for r in range(WORLD.size)]
            leaving = [
                (r, torch.full((n,), 100.0 * i + WORLD.rank))
                for r, n in enumerate(sizes[WORLD.rank])
            ]
            flights.append((arriving, transport.exchange(arriving, leaving, transport.next_tag())))
            del leaving
        for arriving, request in mine.sample(flights, 3):
            request.wait()
            for rank, landing in arriving:
                assert landing.eq(100 * i + rank).all()


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
        *(torch.uint8, torch.int16, torch.int64, torch.bool),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 70_001])
def test_all_types_are_added_up(dtype: torch.dtype, size: int) -> None:
    transport = connected(2**16)
    each = [(torch.arange(size) % 5 + r).to(dtype) for r in range(WORLD.size)]
    total = each[WORLD.rank].clone()
    request = transport.all_reduce(total, WORLD)
    request.wait()
    expected = torch.stack(each).to(dtype if dtype.is_complex else torch.float64).sum(0)
    assert torch.equal(total, expected.ne(0) if dtype == torch.bool else expected.to(dtype))


@pytest.mark.parallel(RANKS)
def test_sums_have_the_same_bits_on_all_ranks() -> None:
    transport = connected(2**16, pause=LATE)
    for size in (100, 100_001):
        value = torch.randn(size, generator=torch.Generator().manual_seed(WORLD.rank))
        transport.all_reduce(value, WORLD).wait()
        assert len(set(WORLD.allgather(value.numpy().tobytes()))) == 1


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("apart", [False, True])
def test_tensors_are_gathered_and_broadcast_within_groups(apart: bool) -> None:
    transport = connected(64, halves() if apart else None, LATE)
    group = WORLD.Split(WORLD.rank % 2, -WORLD.rank)  # in the opposite order
    members = [r for r in range(WORLD.size) if r % 2 == WORLD.rank % 2][::-1]
    gathered = transport.all_gather(torch.full((2, 30), WORLD.rank), group)
    assert gathered[:, 1, 29].tolist() == members
    value = torch.full((40,), 1.0 + WORLD.rank)
    transport.broadcast(value, group)
    assert value.eq(1 + members[0]).all()
    transport.all_reduce(value, group).wait()
    assert value.eq(len(members) * (1 + members[0])).all()
    group.Free()


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("method", ["overlapped", "assembled"])
def test_halos_are_bitwise_those_of_mpi(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = dc.ProcessGrid(height=-1)
    rng = random.Random(1)
    transports = grid.transport, connected(500, pause=LATE)
    for _ in range(8):
        kernel, channels = rng.choice([1, 3, 5, 7]), rng.randrange(1, 9)
        shape = 2, channels, rng.randrange(kernel, 40), rng.randrange(kernel, 60)
        generator = torch.Generator().manual_seed(rng.randrange(2**30))
        weight = torch.randn(5, channels, kernel, kernel, generator=generator)
        x = torch.randn(shape, generator=generator)
        results = []
        for transport in transports:
            monkeypatch.setattr(grid, "_transport", transport)
            cut = dc.distribute_tensor(x, grid).requires_grad_()
            with dc.method(method):
                y = F.conv2d(F.max_pool2d(cut, 3, 1, 1), weight, padding=kernel // 2)
                (gradient,) = torch.autograd.grad(y.square().sum(), cut)
            results.append((y.to_local(), gradient.to_local()))
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parallel([4])
def test_ranks_reach_each_other_only_where_both_do() -> None:
    transport = connected(64, halves())
    assert isinstance(transport, PeerTransport)
    assert [transport._is_near(r) for r in range(4)] == [
        r // 2 == WORLD.rank // 2 for r in range(4)
    ]
