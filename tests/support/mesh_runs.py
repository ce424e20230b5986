"""Small data and runs of the mesh-tangling example."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from mpi4py import MPI

import distconv as dc
from examples.mesh_tangling.generate import generate

WORLD = MPI.COMM_WORLD
REPOSITORY = Path(__file__).parents[2]
SAMPLES, SIZE = 5, 64


def write_file(path: Path, samples: int = SAMPLES, seed: int = 0, **replaced: Any) -> None:
    """Write a small file of the generator's layout, whose mask follows from two channels."""
    rng = np.random.default_rng(seed)
    state = rng.standard_normal((samples, 18, SIZE, SIZE), np.float32)
    datasets = {
        "state": state,
        "tangled": (state[:, :1] + state[:, 10:11] > 1).astype(np.uint8),
        "channel_mean": np.linspace(-1, 1, 18, dtype=np.float32),
        "channel_deviation": np.linspace(0.5, 2, 18, dtype=np.float32),
    } | replaced
    with h5py.File(path, "w") as file:
        for name, values in datasets.items():
            if values is not None:
                file[name] = values


def generate_alone(path: Path, samples: int, size: int, seed: int = 0) -> float:
    """Generate samples on one rank; not collective."""
    return generate(path, samples, size, seed, dc.ProcessGrid(MPI.COMM_SELF, device="cpu"))


def arguments(file: Path, output: Path, grid: dict[str, int], epochs: int, *more: str) -> list[str]:
    """Return the command line of a small run in double precision, where grids must agree."""
    axes = ",".join(f"{axis}={ranks}" for axis, ranks in grid.items()) or "sample=1"
    line = (
        f"--data {file} --validation {file} --output {output} --grid {axes} --epochs {epochs} "
        "--network 1k --width 0.02 --batch-size 4 --precision float64"
    )
    return line.split() + list(more)


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Let this process write no file beyond `size` bytes, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
