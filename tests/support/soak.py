"""Train for many steps of changing shapes, make and drop many models, and check for leaks.

`mpiexec -n 4 python -m tests.support.soak`, as `make nightly` runs it; with `steps` or `models` one
half. Every rank looks at itself; a rank that holds more than before raises, which ends the job.
"""

from __future__ import annotations

import gc
import random
import resource
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

import distconv as dc
from distconv.grid.communicators import _store

WORLD = MPI.COMM_WORLD
SLACK = 16 * 2**20
"""Bytes of resident memory that an allocator may come to hold without a leak."""


class Held(NamedTuple):
    """Resources of this rank: memory of tensors and of the process in bytes, and communicators."""

    tensors: int
    communicators: int
    resident: int

    def __str__(self) -> str:
        return (
            f"{self.tensors / 2**10:.0f} KiB of tensors, {self.communicators} communicators, "
            f"{self.resident / 2**20:.1f} MiB resident"
        )


def held() -> Held:
    """Return the resources in use, after collecting all garbage."""
    while gc.collect():
        pass
    found = (x for x in gc.get_objects() if issubclass(type(x), Tensor))
    storages = [x.untyped_storage() for x in found if not isinstance(x, dc.DistTensor)]
    size = {storage._cdata: storage.nbytes() for storage in storages}
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Held(sum(size.values()), len(_store().communicators), pages * resource.getpagesize())


class Net(nn.Module):
    """A network that keeps constants for the shapes, with a branch that not all steps take."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect")
        self.norm = nn.BatchNorm2d(8)
        self.deep, self.skip = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, short: bool) -> Tensor:
        x = F.avg_pool2d(F.relu(self.norm(self.conv(x))), 3, 2, 1, ceil_mode=True)
        x = self.skip(x) if short else self.deep(x) + self.skip(x)
        x = F.interpolate(x, scale_factor=1.5, mode="bilinear")
        return self.head(x.mean((2, 3)))


def made(grid: dc.ProcessGrid, shard: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a model whose later layers cut channels, and its optimizer."""
    layouts = {name: dc.Layout(sample="sample", channel="height") for name in ("deep", "skip")}
    model = dc.parallelize(Net(), grid, layouts=layouts, shard_parameters=shard, bucket_bytes=500)
    return model, torch.optim.Adam(model.parameters())


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: dc.DistTensor, short: bool = False
) -> None:
    """Train once on a mini-batch; after a step with all branches, evaluate it."""
    weight = dc.distribute_tensor(torch.ones(2), x.grid, dc.Layout()).requires_grad_()
    (model(x, short).square() * weight).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if not short:
        with torch.no_grad():
            model(x, short)


def train(rounds: int, shapes: int) -> tuple[list[Held], list[float]]:
    """Take a step of each of some shapes, round after round.

    Returns what is held after each round, and the seconds of each step.
    """
    grid = dc.ProcessGrid(height=2 if WORLD.size % 2 == 0 else 1, sample=-1)
    model, optimizer = made(grid, shard=True)
    rng = random.Random(0)
    sizes = [(rng.randint(1, 6), 3, rng.randint(8, 40), rng.randint(8, 40)) for _ in range(shapes)]
    marks, seconds = [], []
    for _ in range(rounds):
        for i, size in enumerate(sizes):
            start = time.perf_counter()
            x = dc.distribute_tensor(torch.ones(size), grid)
            step(model, optimizer, x, short=i % 4 > 0)
            seconds.append(time.perf_counter() - start)
        del x
        marks.append(held())
    return marks, seconds


def make_and_drop(rounds: int, models: int) -> list[Held]:
    """Make models on grids of all kinds, train and drop them; return each round's resources."""
    marks = []
    for _ in range(rounds):
        for i in range(models):
            part = WORLD.Split(WORLD.rank % 2) if i % 4 == 3 else WORLD.Dup()
            axis = ("sample", "height", "channel")[i % 3]
            grid = dc.ProcessGrid(part, **{axis: -1})
            x = dc.distribute_tensor(torch.ones(4, 3, 12, 10), grid)
            step(*made(grid, shard=i % 2 == 0), x)
            del grid, x
            part.Free()
        marks.append(held())
    return marks


def check_flat(what: str, marks: list[Held]) -> None:
    """Print the resources of each round; raise where they have grown after caches have filled."""
    if WORLD.rank == 0:
        for mark in marks:
            print(f"after {what} more: {mark}", flush=True)
    first, last = marks[1], marks[-1]
    assert last.tensors == first.tensors, marks
    assert last.communicators == first.communicators, marks
    assert last.resident <= first.resident + SLACK, marks


def main() -> None:
    """Take 1,500 steps of 250 shapes, and make 200 models."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    parts = sys.argv[1:] or ["steps", "models"]
    if "steps" in parts:
        marks, seconds = train(rounds=6, shapes=250)
        ratio = sum(seconds[-100:]) / sum(seconds[:100])
        if WORLD.rank == 0:
            print(f"the last 100 steps took {ratio:.2f} times as long as the first 100")
        check_flat("250 steps", marks)
    if "models" in parts:
        check_flat("40 models", make_and_drop(rounds=5, models=40))


if __name__ == "__main__":
    main()
