"""Ranks that have diverged are found and named; metrics are averaged by samples."""

from __future__ import annotations

import random
from math import isnan, nan
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn

import distconv as dc
from distconv.tensor.dist_tensor import DistTensor
from distconv.training import LARC, assert_in_sync
from tests.support.serial import raised_everywhere, random_grid, random_tensor

WORLD = MPI.COMM_WORLD
LAST = WORLD.size - 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).mean((2, 3)))


def trained(grid: dc.ProcessGrid, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(WORLD.rank)
    model = dc.parallelize(Net(), grid, **options)
    optimizer = LARC(torch.optim.Adam(model.parameters()), on="update")
    for seed in range(2):
        x = random_tensor(random.Random(seed), (4, 2, 4, 4), torch.float32)
        optimizer.zero_grad()
        model(dc.distribute_tensor(x, grid)).square().mean().backward()
        optimizer.step()
        assert_in_sync(model, optimizer)
    return model, optimizer


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("shard", [False, True])
def test_ranks_that_train_together_are_in_sync(shard: bool) -> None:
    grid = random_grid(random.Random(1), ("sample", "channel"))
    model, optimizer = trained(grid, shard_parameters=shard)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    assert_in_sync(model, optimizer)
    # What is spelled otherwise on every rank says nothing.
    optimizer.param_groups[0]["callback"] = object()
    assert_in_sync(model, optimizer)


def change_weight(model: Any, optimizer: Any) -> None:
    model.head.weight.data[1, 2] += 0.5


def change_buffer(model: Any, optimizer: Any) -> None:
    model.norm.running_var[3] += 0.5


def change_state(model: Any, optimizer: Any) -> None:
    optimizer.state[model.conv.bias]["exp_avg_sq"] += 0.5


def change_rate(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.7


def lose_state(model: Any, optimizer: Any) -> None:
    del optimizer.state[model.norm.weight]


@pytest.mark.parallel([2])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_weight, "head.weight is not the same on all ranks"),
        (change_buffer, "norm.running_var is not the same"),
        (change_state, "exp_avg_sq of conv.bias is not the same"),
        (change_rate, "lr of parameter group 0, 0.001,"),
        (lose_state, "step of norm.weight is not the same"),
    ],
)
def test_the_first_difference_is_named_with_its_ranks(change: Any, words: str) -> None:
    model, optimizer = trained(dc.ProcessGrid(sample=-1))
    if WORLD.rank == LAST:
        change(model, optimizer)
    message = raised_everywhere(RuntimeError, assert_in_sync, model, optimizer)
    assert words in message
    assert f"rank {LAST} " in message
    if change in (change_weight, change_buffer):
        assert words in raised_everywhere(RuntimeError, assert_in_sync, model)
    else:
        assert_in_sync(model)


@pytest.mark.parallel([2, 4])
def test_one_element_of_a_large_tensor_is_seen() -> None:
    model = dc.parallelize(nn.Linear(1000, 1000), dc.ProcessGrid(sample=-1))
    for element in (123_457, 765_433):
        if WORLD.rank == LAST:
            model.weight.data.view(-1)[element] += 1.0
        assert "weight is not" in raised_everywhere(RuntimeError, assert_in_sync, model)
        dc.load_full_state_dict(model, WORLD.bcast(model.state_dict()))
        assert_in_sync(model)


@pytest.mark.parallel([4])
def test_a_sharded_block_is_compared_with_its_replicas() -> None:
    grid = dc.ProcessGrid(sample=2, channel=2)
    model, optimizer = trained(grid, shard_parameters=True)
    assert isinstance(model.head.weight, DistTensor)
    if WORLD.rank == 3:
        model.head.weight.shard.data += 1.0
    message = raised_everywhere(RuntimeError, assert_in_sync, model, optimizer)
    assert "head.weight is not" in message and "rank 3 differs from rank 1" in message


def test_a_model_that_is_not_parallelized_is_refused() -> None:
    with pytest.raises(ValueError, match="not parallelized"):
        assert_in_sync(nn.Linear(2, 2))


# Means


@pytest.mark.parallel([1, 2, 4])
def test_a_mean_is_that_of_all_samples() -> None:
    grid = dc.ProcessGrid(sample=-1)
    values = [1.5, -2.0, nan, 7.0][: grid.size]
    weights = [3, 1, 0, 5][: grid.size]
    pairs = [(v, w) for v, w in zip(values, weights, strict=True) if w]
    expected = sum(v * w for v, w in pairs) / sum(w for _, w in pairs)
    own, weight = values[grid.rank], weights[grid.rank]
    for given in (own, torch.tensor([own], dtype=torch.float64, requires_grad=True)):
        mean = grid.mean(given, weight)
        assert mean == pytest.approx(expected, rel=1e-15)
        assert set(WORLD.allgather(mean)) == {mean}
    assert isnan(grid.mean(1.0, 0))
    assert grid.mean(grid.rank) == pytest.approx((grid.size - 1) / 2)


@pytest.mark.parallel([4])
def test_ranks_that_share_samples_count_as_one() -> None:
    grid = dc.ProcessGrid(sample=2, height=2)
    replica = grid.coords["sample"]
    assert grid.mean([1.0, 4.0][replica], [2, 1][replica]) == pytest.approx(2.0)


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("bad", [-1, float("inf"), nan])
def test_a_weight_that_is_none_is_an_error_on_every_rank(bad: float) -> None:
    grid = dc.ProcessGrid(sample=-1)
    with pytest.raises(ValueError, match="is not a weight; pass the number of samples"):
        grid.mean(1.0, bad if grid.rank == LAST else 1)
    assert grid.mean(2.0) == 2.0
