"""Ranks that differ in what they would trace or replay learn it, and none waits for another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

import distconv as dc
from distconv.grid.journal import DivergenceError
from tests.compiling.test_compile import CALLS, batches, identical, same_bits
from tests.support.serial import raised_everywhere, told_once

LAST = MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1
GRIDS = {"samples": {"sample": -1}, "rows": {"height": -1}}


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks compare as they do after many calls."""
    monkeypatch.setattr("distconv.grid.journal._FIRST", 0)


class Training:
    """A program with a step; the last rank does something else in some calls."""

    def __init__(self, grid: dc.ProcessGrid) -> None:
        torch.manual_seed(0)
        self.model = dc.parallelize(nn.Conv2d(3, 2, 3, padding=1), grid)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.odd: Iterator[Callable[[Training, Tensor], Any] | None] = repeat(None)

    def step(self, x: Tensor) -> Tensor:
        """Train by a mini-batch."""
        odd = next(self.odd)
        odd = odd if LAST else None
        y = x if odd is None else odd(self, x)
        loss = self.model(x if y is None else y).square().mean()
        loss.backward()
        if y is not None:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def adds_a_halo(program: Training, x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, 1, 1)


def takes_a_sum(program: Training, x: Tensor) -> Tensor:
    return x * x.mean()


def trains_twice(program: Training, x: Tensor) -> Tensor:
    program.model(x).square().mean().backward()
    return x


def scales(program: Training, x: Tensor) -> Tensor:
    return x * 2.0


def takes_no_step(program: Training, x: Tensor) -> None:
    return None


ODD = {
    adds_a_halo: "avg_pool2d",
    takes_a_sum: "mean",
    trains_twice: "SGD.step",
    scales: "2.0",
    takes_no_step: "SGD.step",
}


@pytest.mark.parallel([2])
@pytest.mark.parametrize("axes", GRIDS)
@pytest.mark.parametrize("odd", ODD, ids=lambda f: f.__name__)
def test_ranks_that_trace_different_steps_all_raise_and_go_on(odd: Any, axes: str) -> None:
    grid = dc.ProcessGrid(**GRIDS[axes])
    for call in (1, 2):
        program, usual = Training(grid), Training(grid)
        program.odd = iter([odd if i == call else None for i in range(CALLS)])
        step = dc.compile(program.step)
        for i, (x, _) in enumerate(batches(grid)):
            if i == call:
                message = raised_everywhere(DivergenceError, step, x)
                assert ODD[odd] in message and "test_ranks.py" in message
                program.optimizer.zero_grad()
                usual.model.load_state_dict(program.model.state_dict())
            else:
                assert identical(step(x), usual.step(x))
        assert step.replays >= CALLS - 5


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_ranks_that_trace_different_passes_of_a_module_all_raise(where: str) -> None:
    grid = dc.ProcessGrid(height=-1)
    program = Training(grid)
    compiled = dc.compile(program.model)

    def train(x: Tensor, odd: bool) -> None:
        z = compiled(x)
        if not (odd and where == "backward"):
            z.backward(torch.ones(z.shape))

    def otherwise(module: nn.Module, args: Any, result: Tensor) -> Tensor:
        return F.avg_pool2d(result, 3, 1, 1) if i == 1 and where == "forward" and LAST else result

    program.model.register_forward_hook(otherwise)
    for i, (x, _) in enumerate(batches(grid)):
        if i == 1:
            raised_everywhere(DivergenceError, lambda x: [train(x, LAST), train(x, False)], x)
            break
        train(x, False)


def logs(grid: dc.ProcessGrid, i: int) -> bool:
    """Return whether this rank logs in a call, as the first one does in some."""
    return grid.rank == 0 and i % 3 == 0


@pytest.mark.parallel([2])
@pytest.mark.parametrize("whole", [True, False])
def test_ranks_in_different_cases_run_them_as_they_are(whole: bool) -> None:
    class Logs(nn.Conv2d):
        def forward(self, x: Tensor, log: bool) -> Tensor:
            return super().forward(x)

    def run(compiled: bool) -> tuple[list[Any], Any]:
        grid = dc.ProcessGrid(height=-1)
        torch.manual_seed(0)
        model = dc.parallelize(Logs(3, 2, 3, padding=1), grid)

        def step(x: Tensor, log: bool) -> Tensor:
            loss = model(x, log).square().mean()
            loss.backward()
            return loss

        f: Any = step if whole else model
        f = dc.compile(f) if compiled else f
        found = []
        for i in range(12):
            for x, _ in [next(batches(grid))]:
                model.zero_grad()
                y = f(x, logs(grid, i))
                if not whole:
                    y.square().mean().backward()
                found += [y.detach(), model.weight.grad]
        return found, f

    with told_once("in different cases"):
        assert same_bits(run).replays >= 4
