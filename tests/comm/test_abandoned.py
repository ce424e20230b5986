"""An error caught on all ranks, wherever it is raised, leaves nothing behind for the next step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import distconv as dc
from distconv.grid import communicators

WORLD = MPI.COMM_WORLD


class Failing(TorchDispatchMode):
    """Count the local operators, and raise in the one of a given number."""

    def __init__(self, at: int | None = None):
        super().__init__()
        self.count, self._at = 0, at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in ("conv", "pool", "batch_norm")):
            self.count += 1
            if self.count - 1 == self._at:
                raise MemoryError("injected")
        return func(*args, **(kwargs or {}))


def network() -> nn.Module:
    """Return layers that exchange halos in all ways."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.MaxPool2d(3, 1, 1),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 4, 5, padding=2),
        nn.AvgPool2d(3, 1, 1),
        nn.ConvTranspose2d(4, 2, 4, stride=2, padding=1),
    ).double()


def step(model: nn.Module, x: Tensor, grid: dc.ProcessGrid) -> list[Tensor]:
    """Take a training step, and return its output and gradients."""
    model.zero_grad()
    input = dc.distribute_tensor(x, grid).requires_grad_()
    y = model(input)
    (y * y).sum().backward()
    assert input.grad is not None
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [y.detach().full_tensor(), input.grad.full_tensor(), *gradients]


@pytest.mark.parallel([2])
@pytest.mark.parametrize("way", ["assembled", "overlapped"])
def test_a_step_after_a_caught_error_is_right_wherever_it_was_raised(way: str) -> None:
    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(network(), grid).eval()
    x = torch.randn(1, 2, 32, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with dc.method(way):
        expected = step(model, x, grid)
        with Failing() as counter:
            step(model, x, grid)
        assert len(set(WORLD.allgather(counter.count))) == 1, "ranks compute alike"
        for at in range(counter.count):
            with pytest.raises(MemoryError), Failing(at):
                step(model, x, grid)
            again = step(model, x, grid)
            for got, wanted in zip(again, expected, strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", ["mpi", "torch"])
def test_memory_of_an_abandoned_message_is_not_used_before_it_has_arrived(name: str) -> None:
    watched: Any = communicators.transport((0, 1), name, ("cpu", "cpu"))
    transport = watched.carrier
    like = torch.zeros(1000)
    if WORLD.rank:
        landing = transport.empty((1000,), like)
        address = landing.data_ptr()
        messages = transport.exchange([(0, landing)], [], 1)
        del messages, landing
        other = transport.empty((1000,), like).fill_(7.0)
        assert other.data_ptr() != address
        WORLD.Barrier()
        transport.exchange([(0, transport.empty((1000,), like))], [], 2).wait()
        assert (other == 7.0).all()
    else:
        WORLD.Barrier()
        transport.exchange([], [(1, torch.ones(1000))], 1).wait()
        transport.exchange([], [(1, torch.ones(1000))], 2).wait()
