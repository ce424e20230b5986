"""A small network with most kinds of layers, and a step of its training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distconv.device.kinds import accelerator

RANKS = [1, 2, 4]

only_with_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch has this for CUDA and HIP alone"
)


def sleep(cycles: int) -> None:
    """Keep the current stream busy for about so many cycles of a GPU."""
    if torch.cuda.is_available():
        torch.cuda._sleep(cycles)
        return
    x = torch.ones(1024, 1024, device=accelerator())
    for _ in range(cycles // 10**6 + 1):
        x = x @ x * 0


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 6, 5, padding=2, padding_mode="circular"),
        nn.GroupNorm(2, 6),
        nn.AvgPool2d(3, 1, 1),
        nn.ConvTranspose2d(6, 4, 2, 2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(4, 4, 3, 2, 1),
    )


def batch(dtype: torch.dtype = torch.float64, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, 36, 20, generator=generator, dtype=dtype)
    return x, torch.randn(2, 4, 36, 20, generator=generator, dtype=dtype)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()
