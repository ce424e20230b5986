"""Ranks that differ in what they trace or replay all raise, and none waits for another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

import distconv as dc
from distconv.grid.journal import DivergenceError
from tests.compiling.test_compile import batches
from tests.support.serial import raised_everywhere

LAST = MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1
GRIDS = {"samples": {"sample": -1}, "rows": {"height": -1}}


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks compare as they do after many calls."""
    monkeypatch.setattr("distconv.grid.journal._FIRST", 0)


def adds_a_halo(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, 1, 1)


def takes_a_sum(x: Tensor) -> Tensor:
    return x * x.mean()


def scales(x: Tensor) -> Tensor:
    return x * 2.0


def reads(x: Tensor) -> Tensor:
    return x if x.mean() > 0 else x


ODD = {adds_a_halo: "avg_pool2d", takes_a_sum: "mean", scales: "mul", reads: "uncompiled"}


@pytest.mark.parallel([2])
@pytest.mark.parametrize("axes", GRIDS)
@pytest.mark.parametrize("odd", ODD, ids=lambda f: f.__name__)
def test_ranks_that_compile_different_programs_all_raise_and_go_on(
    odd: Callable[[Tensor], Tensor], axes: str
) -> None:
    grid = dc.ProcessGrid(**GRIDS[axes])
    torch.manual_seed(0)
    model = dc.parallelize(nn.Conv2d(3, 2, 3, padding=1), grid)
    now: dict[str, Callable[[Tensor], Tensor]] = {"is": lambda x: x}
    usual = now["is"]
    f = dc.compile(lambda x: model(now["is"](x)).square().mean())
    for i, (x, _) in enumerate(batches(grid)):
        now["is"] = odd if LAST and i == 3 else usual
        if i == 3:
            message = raised_everywhere(DivergenceError, f, x)
            assert ODD[odd] in message and "rank 1" in message
        else:
            f(x).backward()
    assert f.replays == 4


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_ranks_that_trace_different_passes_of_a_module_all_raise(where: str) -> None:
    grid = dc.ProcessGrid(height=-1)
    torch.manual_seed(0)
    model = dc.parallelize(nn.Conv2d(3, 2, 3, padding=1), grid)
    compiled = dc.compile(model)

    def train(x: Tensor, odd: bool) -> None:
        z = compiled(x)
        if not (odd and where == "backward"):
            z.backward(torch.ones(z.shape))

    def otherwise(module: nn.Module, args: Any, result: Tensor) -> Tensor:
        return F.avg_pool2d(result, 3, 1, 1) if LAST else result

    for i, (x, _) in enumerate(batches(grid)):
        if i == 1:
            if where == "forward":
                model.register_forward_hook(otherwise)
            raised_everywhere(DivergenceError, lambda x: [train(x, LAST), train(x, False)], x)
            break
        train(x, False)


@pytest.mark.parallel([2])
def test_an_argument_that_differs_between_ranks_is_an_error() -> None:
    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(nn.Conv2d(3, 2, 3, padding=1), grid)
    f = dc.compile(lambda x, log: model(x).square().mean() * (2 if log else 1))
    for x, _ in batches(grid):
        f(x, True).backward()
        f(x, False).backward()
    assert "case 0" in raised_everywhere(DivergenceError, f, x, LAST)
    f(x, True).backward()
