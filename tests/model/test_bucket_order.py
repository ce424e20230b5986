"""Transports that match messages by their order get them in the same order on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn

import distconv as dc
from tests.support.serial import told_on_one_rank

WORLD = MPI.COMM_WORLD


class Recorded:
    """A transport that records its messages and reductions in order."""

    def __init__(self, carrier: Any, ordered: bool):
        self._carrier, self.ordered = carrier, ordered
        self.given: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._carrier, name)

    def exchange(self, *arguments: Any) -> Any:
        self.given.append(("exchange", "all"))
        return self._carrier.exchange(*arguments)

    def all_reduce(self, tensor: Tensor, group: Any) -> Any:
        self.given.append(("all_reduce", f"{group.purpose} {tensor.numel()}"))
        return self._carrier.all_reduce(tensor, group)


class Net(nn.Module):
    """Two layers that exchange halos, and a parameter behind them that only rank 0 uses."""

    def __init__(self, grid: dc.ProcessGrid):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 2, 5, padding=2)
        self.last = nn.ParameterList([torch.tensor(3.0)])
        self._grid = grid

    def forward(self, x: dc.DistTensor) -> Tensor:
        y = self.second(self.first(x)).to_local()
        own = y * self.last[0] if self._grid.rank == 0 else y * 3.0
        return dc.DistTensor.from_local(own, self._grid)


def backward(ordered: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[Tensor]]:
    """Run a backward pass, and return what its transport was given, and the gradients."""
    torch.manual_seed(0)
    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(Net(grid).double(), grid, bucket_bytes=1)
    x = dc.distribute_tensor(torch.rand(1, 1, 16, 8, dtype=torch.float64), grid)
    recorded = Recorded(grid.transport, ordered)
    monkeypatch.setitem(vars(grid), "transport", recorded)
    loss = model(x).square().sum()
    recorded.given.clear()
    with told_on_one_rank(f"last.0 .* on 1 of {WORLD.size} ranks"):
        loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return recorded.given, gradients


@pytest.mark.parallel([2, 3, 4])
def test_a_parameter_without_a_gradient_on_some_ranks_changes_no_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given, gradients = backward(True, monkeypatch)
    everywhere = WORLD.allgather(given)
    assert everywhere == [given] * WORLD.size
    assert ("exchange", "all") in given
    # Where carriers tell messages apart, reductions begin as early as each rank can.
    early, same = backward(False, monkeypatch)
    assert sorted(early) == sorted(given)
    assert len({tuple(theirs) for theirs in WORLD.allgather(early)}) > 1
    for a, b in zip(gradients, same, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
