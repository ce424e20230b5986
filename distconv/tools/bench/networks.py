"""Published networks as plain torch modules, at a quarter of their width.

The mesh-tangling network for 1024^2 meshes, with five convolutions a block; the 3-D U-Net; and
CosmoFlow in both its forms. They know nothing of distconv.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Network(NamedTuple):
    """A network, a training sample for it, and its target."""

    name: str
    make: Callable[[Sequence[int]], nn.Module]
    """The function that makes the network for an input of these spatial sizes."""
    shape: tuple[int, ...]
    target: Callable[[tuple[int, ...]], Tensor]
    """The function that makes the target of the network from the shape of its output."""
    loss: Callable[[Tensor, Tensor], Tensor]
    over_local: float | None = None
    """The most that a step should take, in times of one without communication."""
    remarks: tuple[str, ...] = ()
    """Whatever else tells which network it is."""


def mesh_tangling(size: int, quarter: int = 4) -> nn.Module:
    """Return the 1K network for `size` x `size` meshes, shrunk to 32 x 32 at the least."""
    widths = ((128, 256, 256, 256, 256), *((w,) * 5 for w in (384, 512, 384, 384, 128)))
    layers: list[nn.Module] = []
    channels, kernel, shrunk = 18, 5, 1
    for i, row in enumerate(widths):
        stride = 2 if i < 5 and size // (2 * shrunk) >= 32 else 1
        shrunk *= stride
        for width in row:
            width //= quarter
            layers += [
                nn.Conv2d(channels, width, kernel, stride, kernel // 2, bias=False),
                nn.ReLU(),
                nn.BatchNorm2d(width),
            ]
            channels, kernel, stride = width, 3, 1
    layers += [nn.Conv2d(channels, shrunk**2, 1, bias=False), nn.PixelShuffle(shrunk)]
    return nn.Sequential(*layers, nn.Sigmoid())


class UNet3d(nn.Module):
    """A 3-D U-Net from one channel to three classes, of four levels with two convolutions each."""

    def __init__(self, quarter: int = 4) -> None:
        super().__init__()
        pairs = ((32, 64), (64, 128), (128, 256), (256, 512))
        levels = [tuple(w // quarter for w in pair) for pair in pairs]
        entering = (1, *(last for _, last in levels[:-1]))
        self.down = nn.ModuleList(
            _level(n, *pair) for n, pair in zip(entering, levels, strict=True)
        )
        lasts = [last for _, last in levels]
        self.up = nn.ModuleList(nn.ConvTranspose3d(n, n, 2, 2) for n in reversed(lasts[1:]))
        self.merge = nn.ModuleList(
            _level(a + b, b, b) for a, b in zip(lasts[:0:-1], lasts[-2::-1], strict=True)
        )
        self.head = nn.Conv3d(lasts[0], 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map volumes (samples, 1, D, H, W) to logits (samples, 3, D, H, W)."""
        skips: list[Tensor] = []
        for level in self.down:
            x = level(F.max_pool3d(x, 2) if skips else x)
            skips.append(x)
        skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)


def _level(channels: int, *widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in widths:
        layers += [
            nn.Conv3d(channels, width, 3, padding=1, bias=False),
            nn.BatchNorm3d(width),
            nn.LeakyReLU(),
        ]
        channels = width
    return nn.Sequential(*layers)


class Form(NamedTuple):
    """The choices in which the two published forms of CosmoFlow differ."""

    base: int
    """Channels of the first convolution; every following one has twice as many."""
    most: int
    """Channels at the most."""
    pool: Callable[[], nn.Module]
    head: tuple[int, int]
    """Features of the two linear layers before the last."""


AVERAGE = Form(16, 256, lambda: nn.AvgPool3d(3, 2, 1), (2048, 256))
MAXIMUM = Form(32, 512, lambda: nn.MaxPool3d(2), (128, 64))


def cosmoflow(spatial: Sequence[int], quarter: int = 4, form: Form = AVERAGE) -> nn.Sequential:
    """Return CosmoFlow down to 4^3 positions at most, without batch norm."""
    layers: list[nn.Module] = []
    channels, width, left = 4, form.base // quarter, tuple(spatial)
    while max(left) > 4:
        layers += [nn.Conv3d(channels, width, 3, padding=1), nn.LeakyReLU(0.3), form.pool()]
        channels, width = width, min(2 * width, form.most // quarter)
        left = tuple((n + 1) // 2 for n in left)
    first, second = (features // quarter for features in form.head)
    layers += [nn.Flatten(), nn.Linear(channels * prod(left), first), nn.LeakyReLU(0.3)]
    layers += [nn.Linear(first, second), nn.LeakyReLU(0.3), nn.Linear(second, 4)]
    return nn.Sequential(*layers)


_QUARTER = ("quarter width",)

NETWORKS = (
    Network(
        "mesh-tangling 1K, 512^2",
        lambda spatial: mesh_tangling(max(spatial)),
        (1, 18, 512, 512),
        torch.rand,
        F.mse_loss,
        1.05,
        _QUARTER,
    ),
    Network(
        "3-D U-Net, 64^3",
        lambda spatial: UNet3d(),
        (1, 1, 64, 64, 64),
        lambda made: torch.randint(made[1], (made[0], *made[2:])),
        F.cross_entropy,
        1.08,
        _QUARTER,
    ),
    Network(
        "CosmoFlow, 64^3",
        cosmoflow,
        (1, 4, 64, 64, 64),
        torch.rand,
        F.mse_loss,
        remarks=_QUARTER,
    ),
)
