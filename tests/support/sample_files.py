"""The same small samples in every form that can be read: values are their global indices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import zarr

import distconv as dc
from tests.support.everywhere import on_rank_zero

SAMPLES = 5
X = np.arange(SAMPLES * 3 * 6 * 7, dtype=np.float32).reshape(SAMPLES, 3, 6, 7)
Y = np.arange(SAMPLES * 6 * 7, dtype=np.int64).reshape(SAMPLES, 6, 7)
Z = np.arange(SAMPLES, dtype=np.float64)
FIELDS = {"x": X, "y": Y, "z": Z}


def write_hdf5(path: Path, chunks: Any = None, **options: Any) -> None:
    """Write all fields to one file."""
    with h5py.File(path, "w") as file:
        for name, values in FIELDS.items():
            file.create_dataset(
                name, data=values, chunks=chunks if name == "x" else None, **options
            )


def _hdf5(folder: Path) -> Any:
    on_rank_zero(lambda: write_hdf5(folder / "all.h5"))
    return folder / "all.h5"


def _compressed(folder: Path) -> Any:
    def write() -> None:
        with h5py.File(folder / "packed.h5", "w") as file:
            for name, values in FIELDS.items():
                pieces = (1, *values.shape[1:])
                file.create_dataset(name, data=values, chunks=pieces, compression="gzip")

    on_rank_zero(write)
    return str(folder / "packed.h5")


def _big_endian_halves(folder: Path) -> Any:
    def write() -> None:
        with h5py.File(folder / "half.h5", "w") as file:
            file["x"], file["y"], file["z"] = X.astype(">f2"), Y.astype(">i2"), Z

    on_rank_zero(write)
    return folder / "half.h5"


def _files(folder: Path) -> Any:
    def write() -> None:
        for i in range(SAMPLES):
            with h5py.File(folder / f"sample-{i}.h5", "w") as file:
                for name, values in FIELDS.items():
                    file[name] = values[i]

    on_rank_zero(write)
    return folder / "sample-*.h5"


def _npy(folder: Path) -> Any:
    def write() -> None:
        for name, values in FIELDS.items():
            np.save(folder / f"{name}.npy", values)

    on_rank_zero(write)
    return {name: folder / f"{name}.npy" for name in FIELDS}


def _npy_files(folder: Path) -> Any:
    def write() -> None:
        for name, values in FIELDS.items():
            (folder / name).mkdir()
            for i in range(SAMPLES):
                np.save(folder / name / f"{i}.npy", values[i])

    on_rank_zero(write)
    return {name: folder / name for name in FIELDS}


def _zarr(version: int) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        def write() -> None:
            group = zarr.open_group(str(folder / "all.zarr"), mode="w", zarr_format=version)
            for name, values in FIELDS.items():
                group.create_array(name, data=values, chunks=(1, *values.shape[1:]))

        on_rank_zero(write)
        return folder / "all.zarr"

    return make


def _arrays(folder: Path) -> Any:
    return FIELDS


def _functions(folder: Path) -> Any:
    return {
        name: dc.data.Function(
            lambda sample, box, values=values: values[sample][box.slices],
            SAMPLES,
            values.shape[1:],
            values.dtype,
        )
        for name, values in FIELDS.items()
    }


class Items(torch.utils.data.Dataset[Any]):
    """A torch dataset of dictionaries."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, sample: int) -> Any:
        return {"x": torch.from_numpy(X[sample]), "y": torch.from_numpy(Y[sample]), "z": Z[sample]}


def _items(folder: Path) -> Any:
    return Items()


SOURCES: dict[str, Callable[[Path], Any]] = {
    "hdf5": _hdf5,
    "compressed": _compressed,
    "big-endian halves": _big_endian_halves,
    "hdf5 files": _files,
    "npy": _npy,
    "npy files": _npy_files,
    "zarr 2": _zarr(2),
    "zarr 3": _zarr(3),
    "arrays": _arrays,
    "functions": _functions,
    "torch dataset": _items,
}
"""Functions that make the samples in a folder, by kind; all ranks call them together."""
