"""Elastic averaging follows its recursion, on whole and on sharded parameters."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.optim import SGD

import distconv as dc
from distconv.tensor.dist_tensor import DistTensor
from distconv.training import ElasticAveraging, worker_grid
from tests.support.serial import deviation, raised_everywhere

WORLD = MPI.COMM_WORLD
BOWL, GOAL, RATE = 0.7, 1.5, 0.4
"""The loss is BOWL / 2 (x - GOAL)^2."""


tensor = partial(torch.tensor, dtype=torch.float64)


class Point(nn.Module):
    """A module of two numbers, by which every pixel is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(tensor([3.0, -2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.place[:, None]).mean(2)


def grids() -> list[dc.ProcessGrid]:
    return [dc.ProcessGrid(sample=-1), dc.ProcessGrid(sample=-1, width=2 - WORLD.size % 2)]


def start(grid: dc.ProcessGrid, **options: Any) -> tuple[Any, ElasticAveraging, dc.ProcessGrid]:
    """Return a worker's model that has moved since the center was set, its averaging, its grid."""
    own = worker_grid(grid)
    model = Point()
    with torch.no_grad():
        model.place += grid.coords["sample"]
    dc.parallelize(model, own)
    elastic = ElasticAveraging(model, grid, **options)
    assert model.place.tolist() == [3.0, -2.0]
    with torch.no_grad():
        model.place += grid.coords["sample"]
    return model, elastic, own


def backward(model: nn.Module, own: dc.ProcessGrid) -> None:
    x = dc.distribute_tensor(torch.ones(1, 2, 4, dtype=torch.float64), own)
    model.zero_grad()
    (BOWL / 2 * (model(x) - GOAL).square().sum()).backward()


def center_of(model: Any, elastic: ElasticAveraging) -> Tensor:
    with elastic.center():
        return model.place.detach().clone()


def everyone(model: Any, grid: dc.ProcessGrid) -> Tensor:
    """Return the numbers of every worker."""
    places = WORLD.allgather((grid.coords["sample"], model.place.tolist()))
    return tensor([place for _, place in sorted(dict(places).items())])


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("period", [1, 3])
def test_momentum_and_periods_follow_the_recursion(period: int, nesterov: bool) -> None:
    grid = grids()[-1]
    workers = grid.shape["sample"]
    model, elastic, own = start(grid, period=period)
    optimizer = SGD(model.parameters(), RATE, momentum=0.8, nesterov=nesterov)
    x = everyone(model, grid)
    center, velocity = tensor([3.0, -2.0]), torch.zeros_like(x)
    for step in range(1, 11):
        backward(model, own)
        elastic.step()
        optimizer.step()
        slope = BOWL * (x - GOAL)
        pull = 0.9 / workers * (x - center) if step % period == 0 else torch.zeros_like(x)
        velocity = 0.8 * velocity + slope
        x = x - pull - RATE * (slope + 0.8 * velocity if nesterov else velocity)
        center = center + pull.sum(0)
        assert deviation(everyone(model, grid), x) <= 1e-12
        assert deviation(center_of(model, elastic), center) <= 1e-12


@pytest.mark.parallel([2, 4])
def test_the_model_is_the_center_in_the_context_only() -> None:
    grid = dc.ProcessGrid(sample=-1)
    model, elastic, _ = start(grid)
    own = model.place.detach().clone()
    with pytest.raises(ArithmeticError), elastic.center():
        assert model.place.tolist() == [3.0, -2.0]
        raise ArithmeticError
    assert torch.equal(model.place, own)


@pytest.mark.parallel([1, 2, 4])
def test_a_checkpoint_goes_on_with_the_same_steps() -> None:
    grid = grids()[-1]
    model, elastic, own = start(grid, period=2)
    optimizer = SGD(model.parameters(), RATE)
    again, other, _ = start(grid, period=2)
    second = SGD(again.parameters(), RATE)
    for step in range(7):
        if step == 3:
            file = io.BytesIO()
            torch.save([model.state_dict(), elastic.state_dict()], file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
            again.load_state_dict(state[0])
            other.load_state_dict(state[1])
        for m, e, o in ((model, elastic, optimizer), (again, other, second))[: 1 + (step >= 3)]:
            backward(m, own)
            e.step()
            o.step()
    assert torch.equal(model.place, again.place)
    assert torch.equal(center_of(model, elastic), center_of(again, other))
    with pytest.raises(ValueError, match=r"parameters \['other'\], but the model has \['place'\]"):
        elastic.load_state_dict({"steps": 1, "center": {"other": model.place}})


@pytest.mark.parallel([2, 4])
def test_sharded_parameters_are_averaged_block_by_block() -> None:
    grid = dc.ProcessGrid(sample=2, channel=-1)
    own = worker_grid(grid)
    torch.manual_seed(grid.coords["sample"])
    plain = nn.Conv2d(4, 4, 1)
    first = copy.deepcopy(plain)
    dc.parallelize(plain, own, shard_parameters=True)
    if own.size > 1:
        assert isinstance(plain.weight, DistTensor)
    elastic = ElasticAveraging(plain, grid, alpha=0.25)
    begun = dc.full_state_dict(plain)["weight"].clone()
    assert torch.equal(begun, WORLD.bcast(first.weight.detach()))
    with torch.no_grad():
        plain.weight.mul_(1 + grid.coords["sample"])
    elastic.step()
    state = dc.full_state_dict(plain)
    moved = begun * (1 + grid.coords["sample"])
    assert deviation(state["weight"], moved - 0.25 * (moved - begun)) <= 1e-6
    with elastic.center():
        assert deviation(dc.full_state_dict(plain)["weight"], 1.25 * begun) <= 1e-6


@pytest.mark.parallel([2])
def test_what_does_not_fit_is_an_error_on_every_rank() -> None:
    grid = dc.ProcessGrid(sample=-1)
    own = worker_grid(grid)
    assert own.size == 1

    def made(model: nn.Module, **options: Any) -> str:
        return raised_everywhere(ValueError, lambda: ElasticAveraging(model, grid, **options))

    assert "not parallelized; parallelize it on worker_grid" in made(Point())
    assert f"parallelized on {grid}" in made(dc.parallelize(Point(), grid))
    model = dc.parallelize(Point(), own)
    assert f"up to 1 / {grid.size} for" in made(model, alpha=0.9)
    assert "alpha=-0.1" in made(model, alpha=-0.1)
    assert "period=0 is not a count" in made(model, period=0)
    assert "on the ranks; pass the same" in made(model, period=1 + WORLD.rank)
