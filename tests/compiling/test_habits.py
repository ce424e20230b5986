"""Programs have the same bits with compiled steps as without, whatever their habits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import distconv as dc
from tests.compiling.test_compile import identical

CALLS = 14

Compile = Callable[[Any], Any]
Program = Callable[[Compile, dc.ProcessGrid], Iterator[Any]]


def run(program: Program, compiled: bool) -> tuple[list[Any], list[Any]]:
    """Return the numbers that a program yields, and its compiled steps."""
    torch.manual_seed(0)
    steps: list[Any] = []

    def compile(step: Any) -> Any:
        if not compiled:
            return step
        steps.append(dc.compile(step))
        return steps[-1]

    found = [
        x.detach().clone() if isinstance(x, Tensor) else x
        for x in program(compile, dc.ProcessGrid(height=-1))
    ]
    return found, steps


def replays_of(program: Program) -> list[int]:
    """Check that a program yields the same bits with compiled steps; return their replays."""
    expected = run(program, False)[0]
    actual, steps = run(program, True)
    assert [
        i for i, (x, y) in enumerate(zip(actual, expected, strict=True)) if not identical(x, y)
    ] == []
    return [step.replays for step in steps]


def network(grid: dc.ProcessGrid, channels: int = 2) -> nn.Module:
    """Return a parallelized network in double precision."""
    layers = nn.Conv2d(channels, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 3, padding=1)
    return dc.parallelize(nn.Sequential(*layers).double(), grid)


def batches(grid: dc.ProcessGrid) -> Iterator[tuple[dc.DistTensor, dc.DistTensor]]:
    """Yield mini-batches with two channels, and their targets."""
    for seed in range(CALLS):
        g = torch.Generator().manual_seed(seed)
        x, y = torch.randn(2, 2, 2, 6, 5, generator=g, dtype=torch.float64)
        yield dc.distribute_tensor(x, grid), dc.distribute_tensor(y, grid)


def gradients(*models: nn.Module) -> list[Tensor | None]:
    return [p.grad for model in models for p in model.parameters()]


# Gradients


def accumulates(set_to_none: bool) -> Program:
    def program(compile: Compile, grid: dc.ProcessGrid) -> Iterator[Any]:
        model = network(grid)
        optimizer = torch.optim.Adam(model.parameters(), 0.1)

        @compile
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        for i, batch in enumerate(batches(grid)):
            yield step(*batch)
            yield from gradients(model)
            if i % 3 == 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none)

    return program


@pytest.mark.parallel(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_add_up_over_calls(set_to_none: bool) -> None:
    # Three calls each of the first of a sum, and of the others.
    assert replays_of(accumulates(set_to_none)) == [CALLS - (5 if set_to_none else 3)]


def adversaries(compile: Compile, grid: dc.ProcessGrid) -> Iterator[Any]:
    """Train two networks in turns, one of them in every other call."""
    maker, critic = network(grid), network(grid)
    first, second = (torch.optim.Adam(m.parameters(), 0.1) for m in (maker, critic))

    @compile
    def judge(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            made = maker(x)
        second.zero_grad()
        loss = F.softplus(critic(made)).mean() + F.softplus(-critic(y)).mean()
        loss.backward()
        second.step()
        return loss

    @compile
    def make(x: Tensor) -> Tensor:
        first.zero_grad()
        loss = F.softplus(-critic(maker(x))).mean()
        loss.backward()
        first.step()
        return loss

    for i, (x, y) in enumerate(batches(grid)):
        yield judge(x, y)
        if i % 2:
            yield make(x)
    yield from gradients(maker, critic)


@pytest.mark.parallel(2)
def test_two_networks_are_trained_in_turns() -> None:
    assert replays_of(adversaries) == [CALLS - 4, CALLS // 2 - 3]


def halves(compile: Compile, grid: dc.ProcessGrid) -> Iterator[Any]:
    """Zero in one step the gradients to which another one adds."""
    model = dc.parallelize(nn.ModuleList([nn.Conv2d(2, 2, 3, padding=1) for _ in "ab"]), grid)
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @compile
    def one(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model[0](x), y).backward()

    @compile
    def other(x: Tensor, y: Tensor) -> None:
        F.mse_loss(model[1](x), y).backward()

    for batch in batches(grid):
        one(*batch)
        other(*batch)
        yield from gradients(model)
        optimizer.step()


@pytest.mark.parallel(2)
def test_gradients_of_other_parts_are_zeroed_in_replays() -> None:
    assert replays_of(halves) == [CALLS - 3, CALLS - 3]


def scaled(compile: Compile, grid: dc.ProcessGrid) -> Iterator[Any]:
    """Train a tensor that belongs to no module, whose gradient is kept after some calls."""
    model, scale = network(grid), torch.ones((), requires_grad=True, dtype=torch.float64)

    @compile
    def step(x: Tensor, y: Tensor) -> None:
        F.mse_loss(model(x).detach() * scale, y).backward()

    for i, batch in enumerate(batches(grid)):
        step(*batch)
        yield scale.grad
        if i < 5 or i == 9:
            scale.grad = None


@pytest.mark.parallel(2)
def test_the_gradient_of_a_tensor_outside_of_modules_adds_up() -> None:
    assert replays_of(scaled)[0] > CALLS // 2
