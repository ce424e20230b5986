"""The file of samples as a reader has it: checked when it is opened, and whenever it is read."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import h5py
import numpy as np

from .store import CHANNELS, FORMAT_VERSION

_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError)
"""What h5py raises for files that are damaged, depending on where they are."""

_KINDS = {"state": "f", "tangled": "biu", "channel_mean": "f", "channel_deviation": "f"}
"""The datasets, and the kinds of numbers, as numpy calls them, that may be in them."""


class SampleFile:
    """A file of samples that is laid out as `store` does it. Not collective.

    Attributes:
        path: where it is.
        samples: number of samples.
        size: zones along each side of the mesh.
        mean: of every channel, (18,).
        deviation: likewise.
        checksummed: whether damage to states and targets is noticed when they are read.

    Raises:
        OSError: for a file that is missing, damaged, or may not be read.
        ValueError: for one that is laid out otherwise.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _open(path)
        try:
            datasets = {name: _dataset(self._file, path, name) for name in _KINDS}
            _check_layout(datasets, path)
            _check_attributes(self._file, path)
            self.mean = datasets["channel_mean"][:]
            self.deviation = datasets["channel_deviation"][:]
            self._attributes = _attributes(self._file) + _attributes(datasets["state"])
        except Exception as error:
            self._file.close()
            if isinstance(error, OSError | ValueError) and str(path) in str(error):
                raise
            raise _damaged(path, error) from error
        if not np.isfinite(self.mean).all():
            raise ValueError(f"{path}: channel_mean must be finite in every channel")
        if not (np.isfinite(self.deviation) & (self.deviation > 0)).all():
            raise ValueError(f"{path}: channel_deviation must be positive in every channel")
        self._datasets = datasets
        self._descriptor = self._file.id.get_vfd_handle()
        self._bytes = os.fstat(self._descriptor).st_size
        self.samples, _, self.size, _ = datasets["state"].shape
        self.checksummed = all(datasets[name].fletcher32 for name in ("state", "tangled"))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the dataset `name`."""
        return self._datasets[name].shape

    def dtype(self, name: str) -> np.dtype:
        """Return the type of the values of the dataset `name`, as this machine has it."""
        return self._datasets[name].dtype.newbyteorder("=")

    def read_into(
        self, values: np.ndarray, place: int, name: str, sample: int, box: tuple[slice, ...]
    ) -> None:
        """Read a box of one sample of the dataset `name` into `values[place]`.

        Raises:
            OSError: for a sample that is damaged, or no longer there.
        """
        try:
            self._datasets[name].read_direct(values, (sample, *box), place)
            bytes_now = os.fstat(self._descriptor).st_size
        except _ERRORS as error:
            raise OSError(
                f"{self.path}: cannot read {name!r} of sample {sample}: {error}; generate or copy "
                "the file again"
            ) from error
        # HDF5 takes what lies behind the end of a file for zeros.
        if bytes_now != self._bytes:
            raise OSError(
                f"{self.path}: changed while it was read, from {self._bytes} to {bytes_now} bytes; "
                "generate or copy the file again, and not while it is in use"
            )

    def facts(self) -> dict[str, str]:
        """Return what ranks that have opened the same file agree on, by name.

        The checksum is of the statistics, and of the first zones of the first and the last sample.
        """
        digest = hashlib.sha256(self.mean.tobytes() + self.deviation.tobytes())
        for sample in (0, self.samples - 1):
            zones = np.empty((1, 1, 1, self.size), self.dtype("state"))
            self.read_into(zones, 0, "state", sample, (slice(0, 1), slice(0, 1)))
            digest.update(zones.tobytes())
        facts = {
            "size": f"{self._bytes} bytes",
            "shape": str(self.shape("state")),
            "type": str(self.dtype("state")),
            "attributes": self._attributes,
            "checksum": digest.hexdigest()[:16],
        }
        return {f"{name} of {self.path.name}": value for name, value in facts.items()}


def _open(path: Path) -> h5py.File:
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name an HDF5 file in it")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        return h5py.File(path, "r")
    except PermissionError as error:
        raise PermissionError(f"{path}: you may not read this file ({error})") from error
    except _ERRORS as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> OSError:
    return OSError(f"{path}: not a whole HDF5 file; generate or copy it again ({error})")


def _dataset(file: h5py.File, path: Path, name: str) -> h5py.Dataset:
    """Return a dataset that lies in the file itself."""
    if name not in file.keys():
        raise ValueError(f"{path}: no dataset {name!r}; the file has {sorted(file)}")
    if not isinstance(file.get(name, getlink=True), h5py.HardLink):
        raise ValueError(
            f"{path}: {name!r} is a link; expected a dataset in the file itself, as h5repack or "
            "h5copy -f ext,soft make it"
        )
    dataset = file[name]
    if not isinstance(dataset, h5py.Dataset):
        raise ValueError(f"{path}: {name!r} is a {type(dataset).__name__}; expected a dataset")
    if dataset.is_virtual or dataset.external:
        raise ValueError(
            f"{path}: the values of {name!r} lie in other files, which nobody would miss; copy "
            "them into the file itself"
        )
    return dataset


def _check_layout(datasets: dict[str, h5py.Dataset], path: Path) -> None:
    """Compare shapes and types with those of `store`."""
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
    """Compare what the file says of itself, if it does."""
    version = file.attrs.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path}: format_version is {version}, expected {FORMAT_VERSION}; generate it again"
        )
    names = [channel.name for channel in CHANNELS]
    found = file["state"].attrs.get("names", names)
    if list(found) != names:
        raise ValueError(f"{path}: the channels of 'state' are {list(found)}, expected {names}")


def _attributes(place: h5py.File | h5py.Dataset) -> str:
    return ", ".join(f"{name}={place.attrs[name]}" for name in sorted(place.attrs))
