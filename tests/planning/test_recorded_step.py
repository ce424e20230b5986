"""What is recorded in a dry run is what a rank of a real grid runs, and holds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import distconv as dc
from distconv.planning.losses import mean_square, sgd
from distconv.planning.recorded_step import record_step
from distconv.planning.recording import Compute, Recording
from distconv.tools.bench.memory import peak_of

SHAPE = (3, 6, 160, 96)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(6, 8, 5, 2, 2, bias=False), nn.ReLU(), nn.BatchNorm2d(8)),
        *(Residual(), nn.MaxPool2d(3, 2, 1), nn.ConvTranspose2d(8, 4, 2, 2), nn.Sigmoid()),
    )


class Noted(TorchDispatchMode):
    """Counts operators by name and the shapes of their operands."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.found[str(func), shapes(args)] += 1
        return result


def shapes(args: Any) -> tuple[Any, ...]:
    found: list[Any] = []
    for a in args:
        if hasattr(a, "shape"):
            found.append(tuple(a.shape))
        elif isinstance(a, (tuple, list)):
            found += shapes(a)
    return tuple(found)


def step_on(grid: dc.ProcessGrid) -> Any:
    module = dc.parallelize(network(), grid)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    x = dc.distribute_tensor(torch.ones(SHAPE), grid)

    def step() -> None:
        optimizer.zero_grad()
        mean_square(module(x)).backward()
        optimizer.step()

    return step


def recorded(extents: dict[str, int], rank: int) -> Recording:
    return record_step(network(), [SHAPE], extents, rank=rank, loss=mean_square, optimizer=sgd)


GRIDS: list[dict[str, int]] = [{"sample": 2}, {"height": 2}, {"width": 2}]


@pytest.mark.parallel(2)
@pytest.mark.parametrize("extents", GRIDS)
def test_a_recording_has_the_operators_of_a_real_step(extents: dict[str, Any]) -> None:
    grid = dc.ProcessGrid(**extents, device="cpu")
    step = step_on(grid)
    # In every call that is a power of two, parameters are compared among the ranks.
    for _ in range(4):
        step()
    with Noted() as noted:
        step()
    recorded(extents, grid.rank)  # as in a real program, constants are made in the first step
    recording = recorded(extents, grid.rank)
    expected = Counter(
        (e.operator.name, shapes(e.operator.arguments))
        for e in recording.events
        if isinstance(e, Compute) and e.place.layer != "gradients"
    )
    assert expected - noted.found == Counter()
    heavy = ("convolution", "batch_norm", "pool", "relu", "sigmoid", "mean", "add")
    missing = {
        name: n for name, n in (noted.found - expected).items() if any(h in name[0] for h in heavy)
    }
    # What is compared among ranks, and the gradients in their buckets, are not recorded as such.
    assert not missing
    MPI.COMM_WORLD.Barrier()


@pytest.mark.parallel(2)
@pytest.mark.parametrize("extents", GRIDS)
def test_the_memory_of_a_recording_is_that_of_a_real_step(extents: dict[str, Any]) -> None:
    grid = dc.ProcessGrid(**extents, device="cpu")
    measured = peak_of(lambda: step_on(grid)).whole
    recording = recorded(extents, grid.rank)
    # What torch allocates inside of an operator is measured, and not recorded.
    assert 0.9 * measured < recording.peak < 1.02 * measured
