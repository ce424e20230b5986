"""A small network and its samples, for the frameworks of other packages, in float64."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import distconv as dc


def network() -> nn.Sequential:
    """Return the network, with the same weights each time."""
    numbers = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 1))
    net.double()
    with torch.no_grad():
        for p in net.parameters():
            p.normal_(generator=numbers)
    return net


def samples() -> tuple[Tensor, Tensor]:
    """Return 8 images and their targets."""
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(8, 1, 8, 8, generator=numbers, dtype=torch.float64)
    return x, x.roll(1, 2)


def loader(grid: dc.ProcessGrid | None = None) -> Any:
    """Return a loader of the samples; of DistTensors with a grid."""
    plain = DataLoader(TensorDataset(*samples()), batch_size=4)
    return plain if grid is None else dc.data.distribute(plain, grid)


def losses(epochs: int) -> list[float]:
    """Return the losses of plain torch, after SGD at a learning rate of 0.01."""
    net = network()
    optimizer, found = torch.optim.SGD(net.parameters(), lr=0.01), []
    for _ in range(epochs):
        for x, y in loader():
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found


def hide_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the variables of mpiexec, by which a package would start a job of its own."""
    for name in [n for n in os.environ if n.startswith(("PMI_", "MPI_"))]:
        monkeypatch.delenv(name)
