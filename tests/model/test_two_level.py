"""Gradients added up in two levels are the serial ones, and fewer bytes go between replicas."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn

import distconv as dc
from distconv.comm.two_level import TwoLevelSum, has_two_levels
from distconv.geometry.topology import AXES
from distconv.training import ConcurrentReductions, NoiseScale
from tests.model.test_parallelize import Branching, Twins, grids
from tests.support.serial import deviation, raised_everywhere

WORLD = MPI.COMM_WORLD


@pytest.mark.parallel([4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_the_sum_is_that_of_one_level(dtype: torch.dtype) -> None:
    grid = dc.ProcessGrid(sample=2, height=2)
    assert has_two_levels(AXES, grid) and not has_two_levels(("sample",), grid)
    for n in (0, 1, 2, 7, 64):
        parts = torch.arange(4.0 * n).view(4, n).to(dtype)
        flat = parts[WORLD.rank].clone()
        TwoLevelSum(flat, grid, AXES, "tests").wait()
        assert torch.equal(flat, parts.double().sum(0).to(dtype))


@pytest.mark.parallel([1, 2, 4])
def test_models_train_with_the_serial_gradients() -> None:
    for grid in grids(3, 3):
        twins = Twins(grid, two_level=True, bucket_bytes=100)
        for step in range(3):
            twins.backward(step)
            twins.check()
            if step:
                twins.zero_grad()


@pytest.mark.parallel([4])
def test_gradients_that_some_ranks_lack_and_parts_of_no_sync_count() -> None:
    grid = dc.ProcessGrid(sample=2, width=2)

    def branching(seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return Branching().double()

    twins = Twins(grid, branching, two_level=True)
    twins.parallel.choice = twins.serial.choice = 1  # type: ignore[assignment]
    with dc.no_sync(twins.parallel):
        twins.backward(0)
    twins.backward(1)
    twins.check()


@pytest.mark.parallel([4])
def test_sharded_weights_are_summed_over_those_that_hold_their_block() -> None:
    grid = dc.ProcessGrid(sample=2, channel=2)
    torch.manual_seed(0)
    serial = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 1)).double()
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 1)).double()
    model.load_state_dict(serial.state_dict())
    dc.parallelize(model, grid, shard_parameters=True, two_level=True)
    x = torch.randn(4, 4, 6, 5, dtype=torch.float64)
    serial(x).square().mean().backward()
    model(dc.distribute_tensor(x, grid)).square().mean().backward()
    for p, q in zip(serial.parameters(), model.parameters(), strict=True):
        whole = q.grad.full_tensor() if isinstance(q.grad, dc.DistTensor) else q.grad
        assert deviation(whole, p.grad) <= 1e-12


def between_replicas(grid: dc.ProcessGrid, step: Any) -> int:
    """Return the bytes that this rank brings to sums with ranks of other replicas in a step."""
    brought = 0
    all_reduce, exchange = grid.transport.all_reduce, grid.transport.exchange
    own = grid.coords["sample"]
    foreign = [r for r in range(grid.size) if r // (grid.size // 2) != own]

    def reduced(tensor: Tensor, group: Any) -> Any:
        nonlocal brought
        if any(r in foreign for r in group.ranks) and tensor.numel() > 2:
            brought += tensor.nbytes
        return all_reduce(tensor, group)

    def exchanged(arriving: Any, leaving: Any, tag: int) -> Any:
        assert not any(r in foreign for r, _ in leaving)
        return exchange(arriving, leaving, tag)

    with (
        mock.patch.object(grid.transport, "all_reduce", reduced),
        mock.patch.object(grid.transport, "exchange", exchanged),
    ):
        step()
    return brought


@pytest.mark.parallel([4])
def test_half_of_the_bytes_go_between_replicas_of_two_ranks() -> None:
    grid = dc.ProcessGrid(sample=2, height=2)
    x = dc.distribute_tensor(torch.ones(4, 2, 8, 8), grid)
    counts = []
    for two_level in (False, True):
        model = dc.parallelize(nn.Conv2d(2, 8, 3, padding=1), grid, two_level=two_level)
        loss = model(x).square().mean()
        counts.append(between_replicas(grid, loss.backward))
    noise = NoiseScale(model)
    loss = model(x).square().mean()
    counts.append(between_replicas(grid, lambda: noise.backward(loss, 4)))
    # 8 filters of 18 weights and 8 biases, each with a flag behind.
    assert counts == [4 * 154, 4 * 77, 4 * 77]


@pytest.mark.parallel([4])
def test_two_levels_of_several_models_at_once() -> None:
    grid = dc.ProcessGrid(sample=2, height=2)
    torch.manual_seed(0)
    serial = [nn.Conv2d(1, 2, 1).double() for _ in range(2)]
    models = [nn.Conv2d(1, 2, 1).double() for _ in range(2)]
    for one, other in zip(serial, models, strict=True):
        other.load_state_dict(one.state_dict())
        dc.parallelize(other, grid, two_level=True)
    x = torch.randn(2, 1, 4, 4, dtype=torch.float64)
    losses = [model(dc.distribute_tensor(x, grid)).square().mean() for model in models]
    with ConcurrentReductions(*models):
        for i in random.Random(WORLD.rank).sample(range(2), 2):
            losses[i].backward()
    for one, other in zip(serial, models, strict=True):
        one(x).square().mean().backward()
        assert deviation(other.weight.grad, one.weight.grad) <= 1e-12


@pytest.mark.parallel([4])
@pytest.mark.parametrize("transport", ["mpi", "torch"])
@pytest.mark.parametrize("apart", [False, True])
def test_ranks_may_come_to_the_levels_in_different_orders(transport: str, apart: bool) -> None:
    # No other test has connected ranks in this order.
    grid = dc.ProcessGrid([1, 3, 0, 2], sample=2, height=2, transport=transport)
    model = dc.parallelize(nn.Conv2d(1, 2, 1), grid, two_level=True)
    if apart:
        ConcurrentReductions(model)
    purpose = "gradients 0" if apart else "gradients"
    axes = [("sample",), ("height",)]
    numbers = [torch.full((1,), 1.0 + grid.rank) for _ in axes]
    # Each waits for one that comes to another level first, where levels are not connected yet.
    first = (grid.coords["sample"] + grid.coords["height"]) % 2
    sums = [
        grid.transport.all_reduce(numbers[i], grid.communicator(axes[i], purpose))
        for i in (first, 1 - first)
    ]
    for request in sums:
        request.wait()
    peers = [grid.topology.peers(grid.rank, level) for level in axes]
    assert [n.item() for n in numbers] == [sum(1 + rank for rank in ranks) for ranks in peers]


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_gradients_that_travel_as_halves_are_close_and_alike_everywhere(wire: str) -> None:
    for grid in grids(5, 2):
        twins = Twins(grid, wire=wire, bucket_bytes=100)
        for step in range(2):
            # The second pass adds to the sums of the first.
            twins.backward(step)
        pairs = zip(twins.serial.parameters(), twins.parallel.parameters(), strict=True)
        scale = max(p.grad.abs().max() for p in twins.serial.parameters() if p.grad is not None)
        for p, q in pairs:
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                assert (p.grad - q.grad).abs().max() <= 0.05 * scale
                assert WORLD.allgather(q.grad.tolist()) == [q.grad.tolist()] * WORLD.size


@pytest.mark.parallel([1, 2])
def test_options_that_exclude_each_other_are_refused() -> None:
    def both() -> None:
        grid = dc.ProcessGrid(sample=-1)
        dc.parallelize(nn.Linear(2, 2), grid, two_level=True, wire="float16")

    def unknown() -> None:
        dc.parallelize(nn.Linear(2, 2), dc.ProcessGrid(sample=-1), wire="int8")

    assert "exclude each other" in raised_everywhere(ValueError, both)
    assert "choose bfloat16 or float16" in raised_everywhere(ValueError, unknown)


@pytest.mark.parallel([2])
def test_an_option_that_differs_between_ranks_is_refused() -> None:
    def differs() -> None:
        dc.parallelize(nn.Linear(2, 2), dc.ProcessGrid(sample=-1), two_level=WORLD.rank == 1)

    assert "two_level is True on rank 1 and False on rank 0" in raised_everywhere(
        ValueError, differs
    )
