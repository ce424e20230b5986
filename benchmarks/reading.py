"""Reading boxes against reading whole samples, and epochs with kept samples against reading again.

`mpiexec -n 2 python -m benchmarks.reading` writes a compressed HDF5 file of small volumes to a
temporary folder and goes through epochs of it in turns. The file has just been written and lies in
the page cache: what is measured is unpacking and copying, and a file system that is slower than
memory widens the gaps. `--folder` puts the file elsewhere.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

import distconv as dc
from benchmarks.measuring.report import Row, as_table, of_bytes, over
from benchmarks.measuring.settings import Settings, by, chain
from benchmarks.measuring.turns import alternate
from distconv.data import Dataset, Loader
from distconv.planning.scaling import Contender


class WholeSamples(torch.utils.data.Dataset[Any]):
    """A dataset of whole samples, as programs without boxes read them on every rank."""

    def __init__(self, path: Path) -> None:
        self._samples = h5py.File(path, "r")["x"]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, sample: int) -> Any:
        return self._samples[sample]


def write(path: Path, samples: int, extent: int) -> None:
    """Write volumes of smooth numbers and noise, in chunks of an eighth of the extent."""
    along = np.linspace(0, 6, extent, dtype=np.float32)
    smooth = np.sin(along)[:, None, None] * np.cos(along)[:, None] * along
    numbers = np.random.default_rng(0)
    chunk = (1, 1, -(-extent // 8), extent, extent)
    with h5py.File(path, "w") as file:
        shape = (samples, 1, extent, extent, extent)
        made = file.create_dataset("x", shape, "f4", chunks=chunk, compression="gzip", shuffle=True)
        for i in range(samples):
            noise = numbers.standard_normal(smooth.shape, dtype=np.float32)
            made[i, 0] = smooth + 0.1 * noise.round(1)


def reading(path: Path, folder: Path, settings: Settings, batch: int) -> Iterator[Row]:
    """Yield rows of one file on two grids, or one where there is one rank; all ranks call it."""
    for axis in ("depth", "sample")[: settings.ranks]:
        grid = chain(axis)
        boxes = Dataset(path, grid)
        sides = {
            "boxes": boxes,
            "whole samples": Dataset(WholeSamples(path), grid),
            "kept in memory": Dataset(path, grid, cache="memory"),
            "kept in a folder": Dataset(path, grid, cache=folder),
        }
        loaders = {name: Loader(data, batch, shuffle=True) for name, data in sides.items()}
        runs = [
            Contender(lambda loader=loader: sum(len(x) for x in loader), settings.threads)  # type: ignore[misc]
            for loader in loaders.values()
        ]
        times = dict(zip(sides, alternate(grid.comm, runs, settings.seconds), strict=True))
        case = f"{len(boxes)} samples of {by(next(iter(boxes.fields.values())).shape)}"
        row = "reading", case, settings.configuration(grid, f"mini-batches of {batch}")
        yield over(row, "boxes over whole samples", times["boxes"], times["whole samples"], None)
        for name in ("kept in memory", "kept in a folder"):
            yield over(row, f"{name} over boxes read again", times[name], times["boxes"], None)
        of_epoch = {name: _bytes_of_epoch(loader) for name, loader in loaders.items()}
        for name, read in of_epoch.items():
            whole = of_epoch["whole samples"]
            measure = f"bytes that an epoch fetches, {name} over whole samples"
            yield of_bytes(row, measure, read, whole)


def _bytes_of_epoch(loader: Loader) -> int:
    """Return the bytes that all ranks fetch from the file in one more epoch. Collective."""
    before = loader.traffic.bytes_fetched
    for _ in loader:
        pass
    return sum(loader.grid.all_gather_object(loader.traffic.bytes_fetched - before))


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Measure, and print a table on rank 0; all ranks call it. Return the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--extent", type=int, default=64, help="of a volume, in each dimension")
    parser.add_argument("--batch", type=int, default=2, help="samples of a mini-batch")
    parser.add_argument("--seconds", type=float, default=5.0, help="about how long a grid takes")
    parser.add_argument("--folder", type=Path, help="where the file is written, for all ranks")
    chosen = parser.parse_args(arguments)
    grid = dc.ProcessGrid(sample=-1, device="cpu")
    with tempfile.TemporaryDirectory(dir=chosen.folder) as own:
        folder = Path(grid.all_gather_object(own)[0])
        path = folder / "samples.h5"
        dc.data.on_rank_zero(grid, lambda: write(path, chosen.samples, chosen.extent))
        settings = Settings(seconds=chosen.seconds)
        rows = list(reading(path, folder / "kept", settings, chosen.batch))
        if grid.rank == 0:
            print(as_table(rows))
        grid.all_gather_object(None)
    return rows


if __name__ == "__main__":
    main()
