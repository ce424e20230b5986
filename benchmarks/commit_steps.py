"""Take training steps when told to, for `benchmarks.commits`: run by every rank of a commit.

Uses nothing of the benchmarks that come with a commit, and of the library what every commit has.
"""

from __future__ import annotations

import math
import random
import socket
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import distconv as dc


def _convolutions(channels: int, count: int, norm: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(count):
        layers.append(nn.Conv2d(channels, channels, 3, padding=1))
        if norm:
            layers.append(nn.BatchNorm2d(channels))
        layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class _UNet3d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep, self.up = _level(1, 8), _level(8, 16), _level(24, 8)
        self.pool, self.raise_ = nn.MaxPool3d(2), nn.ConvTranspose3d(16, 16, 2, 2)
        self.out = nn.Conv3d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        raised = self.raise_(self.deep(self.pool(skip)))
        return self.out(self.up(torch.cat([skip, raised], 1)))


def _level(channels: int, filters: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(channels, filters, 3, padding=1), nn.BatchNorm3d(filters), nn.ReLU()
    )


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv_512": (lambda: _convolutions(16, 1), (1, 16, 512, 512)),
    "residual_128": (lambda: _convolutions(32, 17, norm=True), (1, 32, 128, 128)),
    "small_64": (lambda: _convolutions(16, 8), (1, 16, 64, 64)),
    "wide_32": (lambda: _convolutions(128, 4), (1, 128, 32, 32)),
    "tiny_32": (lambda: _convolutions(16, 8, norm=True), (2, 16, 32, 32)),
    "unet3d_32": (_UNet3d, (1, 1, 32, 32, 32)),
}


def _leave_holes(size: int) -> list[Tensor]:
    """Leave holes of `size` bytes on the heap; return the walls of random sizes between them.

    A step's buffers would otherwise lie at the same distances from each other in all launches of a
    commit, and distances that caches do not like would pass for a slower commit. Source of the
    idea: Mytkowicz et al., "Producing wrong data without doing anything obviously wrong", 2009.
    """
    holes, walls = [], []
    for _ in range(16):
        holes.append(torch.empty(size + 4096, dtype=torch.uint8))
        walls.append(torch.empty(2**18 + 64 * random.randrange(128), dtype=torch.uint8))
    return walls


def step_of(case: str, grid: dc.ProcessGrid) -> Callable[[], None]:
    """Return the training step of a case, on planes or volumes that are cut along height."""
    make, shape = CASES[case]
    torch.manual_seed(0)
    model = dc.parallelize(make(), grid)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = dc.distribute_tensor(torch.randn(shape), grid)

    def step() -> None:
        optimizer.zero_grad()
        y = model(x)
        (y * y).mean().backward()
        optimizer.step()

    return step


def _seconds_of(step: Callable[[], None], count: int, block: int) -> float:
    """Return the seconds of `count` steps, with new heap holes of `block` bytes in each call."""
    walls = _leave_holes(block)
    step()
    begin = time.perf_counter()
    for _ in range(count):
        step()
    seconds = time.perf_counter() - begin
    del walls
    return seconds


def main() -> None:
    """Connect to the port in the command line; take the steps of each line `CASE COUNT` read from
    it, and write back their seconds.
    """
    torch.set_num_threads(1)
    grid = dc.ProcessGrid(height=-1)
    steps: dict[str, Callable[[], None]] = {}
    address = "localhost", int(sys.argv[1])
    with socket.create_connection(address) as connection, connection.makefile("rw") as told:
        for line in told:
            case, count = line.split()
            if case not in steps:
                steps[case] = step_of(case, grid)
            block = math.prod(CASES[case][1]) * 4 // grid.size
            told.write(f"{_seconds_of(steps[case], int(count), block)}\n")
            told.flush()


if __name__ == "__main__":
    main()
