"""Networks and solvers of many small operators, whose steps are mostly host time and messages.

A step is timed eagerly and compiled, as for the networks of `benchmarks/networks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.family_cases import FNO
from benchmarks.measuring.network import Network
from benchmarks.measuring.own_step import step_rows
from benchmarks.measuring.report import Row
from benchmarks.measuring.settings import Settings

TARGET = 1.3

VELOCITIES = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1), (1, -1), (-1, 1))


class LatticeBoltzmann(nn.Module):
    """Steps of the D2Q9 lattice-Boltzmann method: `torch.roll` for each velocity, and a collision.

    Populations are (sample, 9, height, width), periodic in height and width.
    """

    def __init__(self, steps: int = 5) -> None:
        super().__init__()
        self.steps = steps
        self.rate = nn.Parameter(torch.tensor(0.6))

    def forward(self, f: Tensor) -> Tensor:
        weights = torch.tensor([4 / 9] + [1 / 9] * 4 + [1 / 36] * 4).view(1, 9, 1, 1)
        directions = torch.tensor(VELOCITIES, dtype=f.dtype)
        f = weights * (1 + 0.01 * f)
        for _ in range(self.steps):
            moved = (f[:, i].roll(v, (1, 2)) for i, v in enumerate(VELOCITIES))
            f = torch.stack(list(moved), 1)
            density = f.sum(1, keepdim=True)
            flow = torch.einsum("bqhw,qd->bdhw", f, directions) / density
            along = torch.einsum("bdhw,qd->bqhw", flow, directions)
            square = flow.square().sum(1, keepdim=True)
            balance = weights * density * (1 + 3 * along + 4.5 * along**2 - 1.5 * square)
            f = f + self.rate * (balance - f)
        return f


class Wave(nn.Module):
    """An acoustic wave in a medium: a convolution, the Laplacian, for each of 100 time steps.

    The input is (sample, 2, height, width): the first pressure, and the medium's speed.
    """

    laplacian: Tensor

    def __init__(self, steps: int = 100) -> None:
        super().__init__()
        self.steps = steps
        self.strength = nn.Parameter(torch.tensor(0.1))
        kernel = torch.tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]])
        self.register_buffer("laplacian", kernel.view(1, 1, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        now, speed = x[:, :1], self.strength * x[:, 1:].sigmoid()
        before = now
        for _ in range(self.steps):
            bend = F.conv2d(now, self.laplacian, padding=1)
            now, before = 2 * now - before + speed * bend, now
        return now


class _Gated(nn.Module):
    """Half of the channels times the others."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        return a * b


class _ChannelNorm(nn.Module):
    """A norm over the channels of each position."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, 1, 1))
        self.bias = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).square().mean(1, keepdim=True)
        return self.weight * (x - mean) / (variance + 1e-6).sqrt() + self.bias


class _NAFBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 2 * channels
        self.spatial = nn.Sequential(
            *(_ChannelNorm(channels), nn.Conv2d(channels, wide, 1)),
            *(nn.Conv2d(wide, wide, 3, padding=1, groups=wide), _Gated()),
        )
        self.attention = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, channels, 1))
        self.project = nn.Conv2d(channels, channels, 1)
        self.feed = nn.Sequential(
            *(_ChannelNorm(channels), nn.Conv2d(channels, wide, 1)),
            *(_Gated(), nn.Conv2d(channels, channels, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.spatial(x)
        x = x + self.project(y * self.attention(y))
        return x + self.feed(x)


def nafnet(channels: int = 16, blocks: int = 4) -> nn.Module:
    """Return blocks of NAFNet (Chen et al., 2022) on one level."""
    layers = [_NAFBlock(channels) for _ in range(blocks)]
    first, last = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 3, 3, padding=1)
    return nn.Sequential(first, *layers, last)


def _network(name: str, make: Callable[[], nn.Module], channels: int, extent: int) -> Network:
    shape = 1, channels, extent, extent
    return Network(f"{name}, {extent}^2", lambda spatial: make(), shape, over_plain=TARGET)


NETWORKS = (
    _network("lattice-Boltzmann by roll", LatticeBoltzmann, 9, 256),
    _network("wave equation of 100 convolutions", Wave, 2, 256),
    _network("NAFNet", nafnet, 3, 128),
    _network("FNO", partial(FNO, 16), 3, 192),
)


def small_steps(settings: Settings) -> Iterator[Row]:
    """Yield the rows of all steps; all ranks of MPI call it."""
    return chain.from_iterable(step_rows("small", network, settings) for network in NETWORKS)
