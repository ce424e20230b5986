"""What one GPU tells: a step on one rank beside plain torch, and the shards of wider cuts.

`make gpu` calls it: `python -m benchmarks.gpu benchmarks/results/gpu.md`. A shard is one rank of a
grid that is not there: it computes and packs, and its messages go nowhere. Its bound is the plain
network on a block of the same shape. Times are those between events of the GPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

from benchmarks.record import machine
from distconv import DistTensor, ProcessGrid, distribute_tensor, method, parallelize
from distconv.bench import Row, as_table
from distconv.bench.networks import mesh_tangling
from distconv.bench.report import over
from distconv.bench.settings import by
from distconv.rehearsal import Rehearsal

Step = Callable[[], None]
CUTS = tuple({"height": h, "width": w} for h, w in ((2, 1), (2, 2), (4, 2), (4, 4)))
ROUNDS = 20


def step_of(model: nn.Module, x: Tensor, y: Tensor, kind: torch.dtype | None) -> Step:
    """Forward, loss and backward; under autocast to `kind`, if given."""

    def step() -> None:
        model.zero_grad()
        cast: AbstractContextManager[Any] = torch.autocast("cuda", kind) if kind else nullcontext()
        with cast:
            loss = F.mse_loss(model(x), y)
        loss.backward()

    return step


def alternate(*steps: Step) -> list[tuple[list[float], list[float]]]:
    """For each step its times on the GPU and on the host, in seconds, taken in turns."""
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in steps]
    for step in steps:
        for _ in range(3):
            step()
    for i in range(ROUNDS):
        pairs = list(zip(steps, times, strict=True))
        for step, (gpu, host) in pairs if i % 2 else reversed(pairs):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            before = time.perf_counter()
            start.record()
            step()
            stop.record()
            host.append(time.perf_counter() - before)
            torch.cuda.synchronize()
            gpu.append(start.elapsed_time(stop) * 1e-3)
    return times


def peak_of(step: Step) -> int:
    """The most bytes that a step takes."""
    torch.cuda.reset_peak_memory_stats()
    step()
    return int(torch.cuda.max_memory_allocated())


def one_rank(size: int, quarter: int, kind: torch.dtype | None) -> Iterator[Row]:
    """The 1K mesh network on one rank over plain torch, on the GPU, on the host, and in memory."""
    grid = ProcessGrid(MPI.COMM_SELF)
    x, y = (torch.randn(1, n, size, size, device=grid.device) for n in (18, 1))
    plain = mesh_tangling(size, quarter).to(grid.device)
    model = parallelize(mesh_tangling(size, quarter), grid)
    mine = step_of(model, distribute_tensor(x, grid), distribute_tensor(y, grid), kind)
    serial = step_of(plain, x, y, kind)
    (gpu, host), (bound, host_bound) = alternate(mine, serial)
    name = str(kind or torch.float32).removeprefix("torch.")
    row = "gpu", "mesh-tangling 1K", f"1 rank, {by(x.shape)}, {name}, {grid.transport.name}"
    yield over(row, "over plain torch", gpu, bound, 1.02)
    yield over(row, "host, over plain torch", host, host_bound, None)
    most, bound_most = float(peak_of(mine)), float(peak_of(serial))
    ratio = most / bound_most
    yield Row(*row, "peak memory", "", ratio, ratio, ratio, 1, most, bound_most, in_bytes=True)


def shards(size: int, quarter: int) -> Iterator[Row]:
    """One rank of each cut, overlapped and assembled, over the plain network on its block."""
    device = torch.device("cuda", torch.cuda.current_device())
    for cut in CUTS:
        grid = Rehearsal(cut)

        def block(channels: int, grid: Rehearsal = grid) -> DistTensor:
            hollow = grid.tensor((1, channels, size, size))
            shard = torch.randn(hollow.shard.shape, device=device)
            return DistTensor(shard, hollow.shape, hollow.cuts, grid)

        model, plain = (mesh_tangling(size, quarter).to(device) for _ in range(2))
        x, y = block(18), block(1)
        mine = step_of(model, x, y, None)
        ways = [partial(_forced, way, mine) for way in ("overlapped", "assembled")]
        *each, bound = alternate(*ways, step_of(plain, x.shard, y.shard, None))
        axes = ", ".join(f"{axis}={n}" for axis, n in cut.items())
        row = "gpu", "mesh-tangling 1K, one shard", f"{axes}, {by(x.shard.shape)}, float32"
        for way, (gpu, _) in zip(("overlapped", "assembled"), each, strict=True):
            yield over(row, f"{way}, over no halos", gpu, bound[0], None)


def _forced(way: str, step: Step) -> None:
    with method(way):
        step()


def record(path: Path, size: int = 1024, quarter: int = 1) -> None:
    """Write the tables to `path`."""
    torch.manual_seed(0)
    start = time.perf_counter()
    rows = [row for kind in (None, torch.bfloat16) for row in one_rank(size, quarter, kind)]
    rows += shards(size, quarter)
    gpu = f"GPU       {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    facts = f"{machine()}\n{gpu}\ntime      {time.perf_counter() - start:.0f} s"
    note = "Written by `make gpu`; `benchmarks/gpu.py` says what is measured."
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"# Benchmarks on one GPU\n\n{note}\n\n```\n{facts}\n```\n\n```\n{as_table(rows)}\n```\n"
    )


if __name__ == "__main__":
    record(Path(sys.argv[1]))
