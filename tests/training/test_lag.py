"""Late gradients give the steps of the serial recursion, with any model and optimizer."""

from __future__ import annotations

import copy
import io
from collections import deque
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import distconv as dc
from distconv.training import GradientLag
from tests.model.test_parallelize import Branching, Twins, batch, grids, loss_of, net
from tests.support.serial import raised_everywhere, same_state

WORLD = MPI.COMM_WORLD
RANKS = [1, 2, 4]


def optimizer_of(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.01)


class Serial:
    """A serial run whose gradients wait in a queue for as long as they are to be late."""

    def __init__(self, model: nn.Module, lag: int):
        self.model, self.optimizer = model, optimizer_of(model)
        self.late: deque[list[Tensor | None]] = deque()
        self.lag = lag

    def step(self, seed: int, late: bool) -> None:
        self.model.zero_grad()
        loss_of(self.model, *batch(seed)).backward()
        parameters = list(self.model.parameters())
        if late:
            self.late.append([p.grad for p in parameters])
            oldest = self.late.popleft() if len(self.late) > self.lag else [None] * len(parameters)
            for p, gradient in zip(parameters, oldest, strict=True):
                p.grad = gradient
        self.optimizer.step()


def branching(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Branching().double()


@pytest.mark.parallel([2])
@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("make", [net, branching])
def test_steps_are_those_of_the_serial_recursion(make: Any, lag: int) -> None:
    for grid in grids(3, 2):
        twins = Twins(grid, make, bucket_bytes=64)
        serial, optimizer = Serial(twins.serial, lag), optimizer_of(twins.parallel)
        late = GradientLag(twins.parallel, lag=lag, warmup_steps=2, cooldown_steps=2, total_steps=9)
        for step in range(10):
            for model in (twins.serial, twins.parallel):
                model.choice = step // 2 % 2  # type: ignore[assignment]
            serial.step(step, late=2 <= step < 7)
            before = [p.detach().clone() for p in twins.parallel.parameters()]
            late.backward(loss_of(twins.parallel, *twins.inputs(step)))
            optimizer.step()
            twins.check(1e-9)
            if 2 <= step < 2 + lag:
                assert all(map(torch.equal, before, twins.parallel.parameters()))
            # What the cool-down drops is not kept.
            assert len(late.state_dict()["late"]) == (min(step - 1, lag) if 2 <= step < 7 else 0)


class Slope(nn.Module):
    """A module whose loss is half the square of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).square().mean() / 2


@pytest.mark.parallel(RANKS)
def test_sharded_parameters_get_the_late_gradients_of_their_blocks() -> None:
    grid = dc.ProcessGrid(channel=-1)
    torch.manual_seed(0)
    serial = nn.Sequential(nn.Conv2d(2, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 1)).double()
    model = dc.parallelize(copy.deepcopy(serial), grid, shard_parameters=True)
    its, mine = optimizer_of(serial), optimizer_of(model)
    late, kept = GradientLag(model), None
    for seed in range(4):
        x = torch.randn(2, 2, 6, 5, generator=torch.Generator().manual_seed(seed)).double()
        late.backward(model(dc.distribute_tensor(x, grid)).square().mean())
        mine.step()
        serial.zero_grad()
        serial(x).square().mean().backward()
        gradients = [p.grad for p in serial.parameters()]
        for p, gradient in zip(serial.parameters(), kept or [None] * 4, strict=True):
            p.grad = gradient
        its.step()
        kept = gradients
    same_state(model, serial)


@pytest.mark.parallel(RANKS)
def test_a_checkpoint_takes_along_what_is_under_way() -> None:
    grid = grids(4)[-1]
    twins = Twins(grid)
    whole, optimizer = GradientLag(twins.parallel, lag=2), optimizer_of(twins.parallel)
    again = dc.parallelize(net(5), grid)
    other, second = GradientLag(again, lag=2), optimizer_of(again)
    pairs = [(twins.parallel, whole, optimizer), (again, other, second)]
    for step in range(7):
        if step == 4:
            file = io.BytesIO()
            torch.save([part.state_dict() for part in pairs[0]], file)
            file.seek(0)
            for part, state in zip(pairs[1], torch.load(file, weights_only=True), strict=True):
                part.load_state_dict(state)
        for model, late, opt in pairs[: 1 + (step >= 4)]:
            late.backward(loss_of(model, *twins.inputs(step)))
            opt.step()
    for (name, value), p in zip(
        twins.parallel.state_dict().items(), again.state_dict().values(), strict=True
    ):
        assert torch.equal(value, p), name
    with pytest.raises(ValueError, match="belong to other parameters"):
        GradientLag(dc.parallelize(Slope(), grid)).load_state_dict(whole.state_dict())


@pytest.mark.parallel([1, 2])
def test_what_does_not_fit_is_an_error_on_every_rank() -> None:
    model = dc.parallelize(Slope(), dc.ProcessGrid(sample=-1))

    def made(model: nn.Module = model, **options: Any) -> str:
        return raised_everywhere(ValueError, lambda: GradientLag(model, **options))

    assert "not parallelized" in made(Slope())
    assert "lag=0 is not a count" in made(lag=0)
    assert "warmup_steps=-1" in made(warmup_steps=-1)
    assert "pass total_steps=" in made(cooldown_steps=3)
    assert "integer of 7 or more" in made(cooldown_steps=3, warmup_steps=4, total_steps=6)
