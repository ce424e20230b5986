"""The file of samples: HDF5, with the state and the label of each sample in separate datasets.

    state              (samples, 18, S, S) float32   the channels at the snapshot, in SI units
    tangled            (samples, 1, S, S)  uint8     1 for the zones that tangle, else 0
    channel_mean       (18,)               float64   over all samples and zones
    channel_deviation  (18,)               float64   likewise; 1 for a channel that is constant

Attributes of the file: format_version, samples, size (S), seed, horizon (s). Attributes of
`state`: names and units, one string a channel. The values are physical, not normalised: readers
may use (state - channel_mean) / channel_deviation.

A chunk holds all channels of a tile of at most 32 x 32 zones of one sample, so a rank that owns a
box of a sample reads that box and little more. There is no compression: it saves little on
floating point fields and would make every reader unpack whole chunks. Chunks have checksums
(fletcher32), and in the format of HDF5 1.10 so has the index of chunks: reading a damaged part of
the file is an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

import distconv as dc
from distconv.data.sources.hdf5 import damaged, dataset_in, open_hdf5
from examples.generating.samples import new_file

Field = NDArray[np.floating[Any]]

FORMAT_VERSION = 1

HDF5_VERSION = "v110"
"""The oldest HDF5 that can read the file, and the first with checksums on all metadata."""

TILE = 32
"""Longest side of a chunk, in zones."""


CHANNELS = {
    "density": "kg/m^3",
    "pressure": "Pa",
    "radial velocity": "m/s",
    "bubble volume fraction": "1",
    "aspect ratio": "1",
    "condition number": "1",
    "distortion": "1",
    "Jacobian": "m^2",
    "largest angle": "degree",
    "oddy": "1",
    "scaled Jacobian": "1",
    "shape": "1",
    "shear": "1",
    "skew": "1",
    "smallest angle": "degree",
    "stretch": "1",
    "taper": "1",
    "volume": "m^2",
}
"""The channels of `state` in order, and their units; "1" for a number without dimension."""

_CHECKSUM = 4
"""Bytes of the checksum behind each chunk."""

_STATISTICS = ("channel_mean", "channel_deviation")

_KINDS = {"state": "f", "tangled": "biu"} | dict.fromkeys(_STATISTICS, "f")
"""The datasets, and the kinds of numbers, by numpy's letters, that they may hold."""


@dataclass(frozen=True)
class Description:
    """The description of a file, without the samples.

    Attributes:
        samples: number of samples.
        size: zones along each side of the mesh.
        mean: the mean of every channel, (18,).
        deviation: the deviation of every channel, (18,).
    """

    samples: int
    size: int
    mean: Field
    deviation: Field


def describe(path: Path) -> Description:
    """Return the description of the file at `path`. Not collective.

    Raises:
        OSError: for a file that is missing, damaged, or may not be read.
        ValueError: for a file with another layout.
    """
    with open_hdf5(path) as file:
        try:
            datasets = {name: dataset_in(file, path, name) for name in _KINDS}
            _check_layout(datasets, path)
            _check_attributes(file, path)
            mean, deviation = (datasets[name][:] for name in _STATISTICS)
        except Exception as error:
            if isinstance(error, OSError | ValueError) and str(path) in str(error):
                raise
            raise damaged(path, error) from error
        if not np.isfinite(mean).all():
            raise ValueError(f"{path}: channel_mean must be finite in every channel")
        if not (np.isfinite(deviation) & (deviation > 0)).all():
            raise ValueError(f"{path}: channel_deviation must be positive in every channel")
        samples, _, size, _ = datasets["state"].shape
        return Description(samples, size, mean, deviation)


class Writer:
    """Writes samples of a file that `create` has made, each once; not collective.

    Every rank has one, and writes other samples: the chunks already have their places in the file,
    and are written by the operating system. HDF5 needs no support of MPI for that.

    Args:
        path: the path of the unfinished file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.moments: dict[int, tuple[Field, Field]] = {}
        """By the number of a sample, mean and variance of each channel."""

    def write(self, index: int, fields: Mapping[str, Field], tangled: NDArray[np.bool_]) -> None:
        """Store sample `index`: its fields by channel name and its label, each of shape (S, S)."""
        own = [fields[name] for name in CHANNELS]
        self.moments[index] = np.array([f.mean() for f in own]), np.array([f.var() for f in own])
        # All channels at once: a chunk holds them all, and its checksum is computed at every write.
        sample = {"state": np.stack(own, dtype=np.float32), "tangled": tangled[np.newaxis]}
        # HDF5 makes chunks of values, with checksums, for a file in memory.
        with (
            h5py.File(self.path) as file,
            h5py.File(f"{self.path}.sample", "w", driver="core", backing_store=False) as scratch,
            open(self.path, "r+b", buffering=0) as output,
        ):
            _create_datasets(scratch, 1, len(tangled))
            for name, values in sample.items():
                scratch[name][0] = values
                for _, *tile in _chunk_corners(scratch[name]):
                    mask, content = scratch[name].id.read_direct_chunk((0, *tile))
                    place = file[name].id.get_chunk_info_by_coord((index, *tile))
                    if (place.size, place.filter_mask) != (len(content), mask):
                        raise ValueError(
                            f"{self.path}: chunks have other sizes than they were made with"
                        )
                    os.pwrite(output.fileno(), content, place.byte_offset)
            os.fsync(output.fileno())


@contextmanager
def create(
    grid: dc.ProcessGrid, path: Path, samples: int, size: int, *, seed: int, horizon: float
) -> Iterator[Writer]:
    """Make the file at `path`, of `samples` samples of `size` x `size` zones, in a `with` block, in
    which all ranks write. Collective.

    Raises:
        DataError: on every rank, where the file exists, samples are missing at the end, or the disk
            has no room for the file.
    """
    version = (HDF5_VERSION, HDF5_VERSION)
    moments: dict[int, tuple[Field, Field]] = {}

    def make(partial: Path) -> None:
        with h5py.File(partial, "x", libver=version) as file:
            facts = {"samples": samples, "size": size, "seed": seed, "horizon": horizon}
            file.attrs.update({"format_version": FORMAT_VERSION, **facts})
            _create_datasets(file, samples, size)
            _allocate(file, samples)

    def finish(partial: Path) -> None:
        with h5py.File(partial, "r+", libver=version) as file:
            statistics = _statistics(moments, samples)
            for name, values in zip(_STATISTICS, statistics, strict=True):
                file.create_dataset(name, data=values, chunks=values.shape, fletcher32=True)

    with new_file(grid, path, _bytes_at_most(samples, size), make, finish) as (partial, _):
        writer = Writer(partial)
        yield writer
        for of_rank in grid.all_gather_object(writer.moments):
            moments |= of_rank


def _statistics(moments: Mapping[int, tuple[Field, Field]], samples: int) -> tuple[Field, Field]:
    """Return mean and standard deviation of every channel over all samples and zones."""
    missing = sorted(set(range(samples)) - moments.keys())
    if missing:
        raise ValueError(
            f"samples {missing} were never written, of {samples}; write every index before leaving "
            "create()"
        )
    means, variances = np.array([moments[index] for index in range(samples)]).swapaxes(0, 1)
    # Samples are of one size, so the variance is the mean within plus that of the means.
    deviation = np.sqrt(variances.mean(axis=0) + means.var(axis=0))
    return means.mean(axis=0), np.where(deviation > 0.0, deviation, 1.0)


def _create_datasets(file: h5py.File, samples: int, size: int) -> None:
    """Make the datasets of samples, without their values."""
    channels, tile = len(CHANNELS), min(size, TILE)
    state = file.create_dataset(
        "state",
        shape=(samples, channels, size, size),
        dtype=np.float32,
        chunks=(1, channels, tile, tile),
        fletcher32=True,
    )
    state.attrs["names"] = list(CHANNELS)
    state.attrs["units"] = list(CHANNELS.values())
    file.create_dataset(
        "tangled",
        shape=(samples, 1, size, size),
        dtype=np.uint8,
        chunks=(1, 1, tile, tile),
        fletcher32=True,
    )


def _allocate(file: h5py.File, samples: int) -> None:
    """Reserve a place in the file for every chunk, sample by sample, without its checksum."""
    for index in range(samples):
        for name in ("state", "tangled"):
            dataset = file[name]
            empty = bytes(prod(dataset.chunks) * dataset.dtype.itemsize + _CHECKSUM)
            for _, *tile in _chunk_corners(dataset):
                dataset.id.write_direct_chunk((index, *tile), empty)


def _chunk_corners(dataset: h5py.Dataset) -> Iterator[tuple[int, ...]]:
    """Yield the first index of each chunk of the first sample."""
    shape, chunks = (1, *dataset.shape[1:]), dataset.chunks
    for place in np.ndindex(*(-(-n // chunk) for n, chunk in zip(shape, chunks, strict=True))):
        yield tuple(i * chunk for i, chunk in zip(place, chunks, strict=True))


def _bytes_at_most(samples: int, size: int) -> int:
    """Return an upper bound for the size of a file, of whole chunks and HDF5's metadata."""
    tile = min(size, TILE)
    tiles = (size + tile - 1) // tile
    return samples * tiles**2 * (tile**2 * (4 * len(CHANNELS) + 1) + 128) + 2**16


def _check_layout(datasets: dict[str, h5py.Dataset], path: Path) -> None:
    """Raise `ValueError` where shapes or types differ from the layout of `store`."""
    state = datasets["state"].shape
    if state is None or len(state) != 4:
        raise ValueError(
            f"{path}: dataset 'state' has shape {state}, expected (samples, {len(CHANNELS)}, S, S)"
        )
    samples, size = state[:1], state[-1:]
    expected = {
        "state": (*samples, len(CHANNELS), *size, *size),
        "tangled": (*samples, 1, *size, *size),
        "channel_mean": (len(CHANNELS),),
        "channel_deviation": (len(CHANNELS),),
    }
    for name, shape in expected.items():
        if datasets[name].shape != shape:
            raise ValueError(
                f"{path}: dataset {name!r} has shape {datasets[name].shape}, expected {shape}"
            )
        if datasets[name].dtype.kind not in _KINDS[name]:
            raise ValueError(
                f"{path}: dataset {name!r} has values of type {datasets[name].dtype}, expected "
                f"{'floating point' if _KINDS[name] == 'f' else 'whole'} numbers"
            )
    if not all(state):
        raise ValueError(f"{path}: the file holds no samples")


def _check_attributes(file: h5py.File, path: Path) -> None:
    """Raise `ValueError` where attributes of the file contradict the layout of `store`."""
    version = file.attrs.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path}: format_version is {version}, expected {FORMAT_VERSION}; generate it again"
        )
    names = list(CHANNELS)
    found = file["state"].attrs.get("names", names)
    if list(found) != names:
        raise ValueError(f"{path}: the channels of 'state' are {list(found)}, expected {names}")
