"""A source on a dataset of an HDF5 file, which detects damage and later writes to the file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distconv.data.sources.arrays import check_file, check_unchanged, facts_of_file, only_name
from distconv.data.sources.interface import (
    NUMBERS,
    Array,
    Coordinate,
    Source,
    import_package,
)
from distconv.data.sources.packing import OF_HDF5, ScaleAndOffset, put, user_attributes
from distconv.geometry.layout import Box

if TYPE_CHECKING:
    import h5py

_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError)
"""The exceptions that h5py raises for damaged files, depending on the place of the damage."""


class HDF5Source(Source):
    """A source on a dataset of an HDF5 file, samples first.

    HDF5 reads chunks in full if they have filters or at most 1 MiB, and otherwise only the elements
    of the box. Attributes of NetCDF such as scale_factor are applied as in `ScaleAndOffset`.

    Parameters
    ----------
    path: the file; every rank opens it.
    dataset: the name of the dataset in the file; None if there is only one dataset.
    single: whether the dataset is one sample, without a dimension for samples.
    external: whether the dataset may be a link or a virtual dataset, or have its values in other
        files. Ranks do not compare other files, and HDF5 reads fill values for missing parts.
    file: an open binary file to read from, such as a file of fsspec. `path` is then only a name for
        messages, and later writes to the file are not detected.

    Raises
    ------
    OSError
        For a file that is missing or damaged, or without the permission to read it.
    ValueError
        For a dataset that is missing, or not made of numbers in the file itself.

    Examples
    --------
    >>> from pathlib import Path
    >>> grid = dc.ProcessGrid(height=2)
    >>> path = dc.data.save("train.h5", {"x": dc.distribute_tensor(torch.ones(10, 1, 8, 8), grid)})
    >>> source = dc.data.HDF5Source(Path("train.h5"), "x")
    >>> source.samples, source.shape, str(source.dtype)
    (10, (1, 8, 8), 'float32')
    >>> dc.data.Dataset(source, grid).batch([0, 1]).sum().item()
    128.0
    """

    def __init__(
        self,
        path: Path,
        dataset: str | None = None,
        single: bool = False,
        external: bool = False,
        file: Any = None,
    ) -> None:
        self._path, self._single = path, single
        self._file = open_hdf5(path, file)
        self._descriptor = self._file.id.get_vfd_handle() if file is None else None
        self._before = self._stat()
        try:
            self._dataset = dataset_in(self._file, path, dataset, external)
            self._label = self._dataset.name.lstrip("/")
            self.name = f"{self._label!r} of {path.name}"
            self._describe()
        except Exception as error:
            self._file.close()
            if isinstance(error, OSError | ValueError) and path.name in str(error):
                raise
            raise damaged(path, error) from error

    def _stat(self) -> os.stat_result | None:
        """Return the `os.fstat` result of the file; None for an object in a store."""
        return None if self._descriptor is None else os.fstat(self._descriptor)

    def _describe(self) -> None:
        shape = self._dataset.shape
        if shape is None or (not shape and not self._single):
            raise ValueError(
                f"{self._path}: {self._label!r} has shape {shape}; expected an array of samples"
            )
        self.samples, self.shape = (1, shape) if self._single else (shape[0], shape[1:])
        self._packing = ScaleAndOffset(self._dataset.attrs, self.name)
        self.attributes = user_attributes(self._dataset.attrs)
        found = {d + self._single: _coordinate(own) for d, own in enumerate(self._dataset.dims)}
        self.coordinates = {d: own for d, own in found.items() if own is not None}
        self.dtype = self._dataset.dtype.newbyteorder("=")
        if self._packing:
            self.dtype = self._packing.unpacked(np.empty(0, self.dtype)).dtype
        chunks = self._dataset.chunks
        if chunks is not None:
            self.chunks = (1, *chunks) if self._single else chunks
        self.check_numbers()

    def read_into(self, out: Array, sample: int, box: Box) -> None:
        """Read a box of one sample into `out`, without a copy unless values are scaled.

        Raises OSError for a sample that is damaged, and for a file that has changed.
        """
        index = box.slices if self._single else (sample, *box.slices)
        direct = out.ndim and not self._packing
        try:
            if direct:
                self._dataset.read_direct(out, index)
            else:
                stored = self._dataset[index]
            now = self._stat()
        except _ERRORS as error:
            raise OSError(
                f"{self._path}: cannot read {self._label!r} of sample {sample}: {error}; create "
                "or copy the file again"
            ) from error
        if self._before is not None and now is not None:
            check_unchanged(self._path, self._before, now)
        if not direct:
            put(out, self._packing.unpacked(stored), self.name)

    def facts(self) -> dict[str, str]:
        """Return facts for ranks to compare, with checksums of values and file, and attributes."""
        return (
            super().facts()
            | self.first_values()
            | (facts_of_file(self._path) if self._descriptor is not None else {})
            | {
                f"attributes of {self._path.name}": _attributes(self._file),
                f"attributes of {self.name}": _attributes(self._dataset),
            }
        )


def open_hdf5(path: Path, file: Any = None) -> h5py.File:
    """Open and return an HDF5 file for reading; raise OSError, naming `path`, on failure.

    `file` is None, or an open binary file to read instead of `path`.
    """
    h5py = import_package("h5py", f"{path}: reading HDF5", "data")
    if file is None:
        check_file(path, "an HDF5 file")
    try:
        return h5py.File(path if file is None else file, "r")
    except PermissionError as error:
        raise PermissionError(f"{path}: no permission to read this file ({error})") from error
    except _ERRORS as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> OSError:
    """Return an `OSError` with a remedy for a file that HDF5 cannot open because of `error`."""
    if "unable to lock file" in str(error):
        return OSError(
            f"{path}: another program has the file open for writing; read it after that program "
            "has closed it. On a file system without locks, set HDF5_USE_FILE_LOCKING=FALSE for "
            f"both programs ({error})"
        )
    return OSError(f"{path}: not a whole HDF5 file; create or copy it again ({error})")


def dataset_in(
    file: h5py.File, path: Path, name: str | None, external: bool = False
) -> h5py.Dataset:
    """Return the dataset `name` of an open file, or the only dataset if `name` is None.

    Coordinates of NetCDF files do not count as datasets. Raises ValueError if there is no such
    dataset, or, unless `external`, if the dataset is a link or has its values in other files.
    """
    import h5py

    if name is None or name not in file:
        fields = [f for f in sorted(file) if not _is_coordinate(file.get(f))]
        name = only_name(path, name, fields or sorted(file))
    if not external and not isinstance(file.get(name, getlink=True), h5py.HardLink):
        raise ValueError(
            f"{path}: {name!r} is a link; expected a dataset in the file itself. Convert the file "
            "by h5repack or h5copy -f ext,soft, or pass HDF5Source(..., external=True)"
        )
    dataset = file[name]
    if not isinstance(dataset, h5py.Dataset):
        raise ValueError(f"{path}: {name!r} is a {type(dataset).__name__}; expected a dataset")
    if not external and (dataset.is_virtual or dataset.external):
        raise ValueError(
            f"{path}: the values of {name!r} are in other files, and HDF5 reads fill values if "
            "those are missing; copy them into the file itself, or pass HDF5Source(..., "
            "external=True)"
        )
    return dataset


def _is_coordinate(found: Any) -> bool:
    """Return whether a dataset holds the positions along a dimension of datasets, as in NetCDF."""
    return getattr(found, "attrs", {}).get("CLASS") == b"DIMENSION_SCALE"


def _coordinate(dimension: Any) -> Coordinate | None:
    """Return the positions along a dimension of a dataset; None if the file has no positions."""
    if not len(dimension):
        return None
    scale = dimension[0]
    # NetCDF stores a dimension without positions as a dataset with this attribute NAME.
    if b"not a netCDF variable" in scale.attrs.get("NAME", b"") or scale.dtype.kind not in NUMBERS:
        return None
    attributes = {key: value for key, value in scale.attrs.items() if key not in OF_HDF5}
    return Coordinate(scale.name.rpartition("/")[2], scale[...], attributes)


def _attributes(place: h5py.File | h5py.Dataset) -> str:
    return ", ".join(f"{name}={place.attrs[name]}" for name in sorted(place.attrs))
