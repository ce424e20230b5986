"""Writing HDF5 and `.npy` files from all ranks, each its own box of an array.

Both formats store an array contiguously, at an offset that is known once the file is made. So ranks
write disjoint bytes with calls of the operating system alone; HDF5 needs no support of MPI.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distconv.data.durable import unseen
from distconv.data.sources.interface import Coordinate, import_package
from distconv.geometry.layout import Box


@dataclass(frozen=True)
class Description:
    """An array to be written.

    Attributes
    ----------
    chunks: the extents of its chunks in zarr.
    order: its dimensions in the order in which the file stores them; None as they are.
    attributes, coordinates: as in `Source`; formats without room for them keep none.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    coordinates: Mapping[int, Coordinate] = field(default_factory=dict)


def create_hdf5(path: Path, arrays: Mapping[str, Description]) -> dict[str, int]:
    """Make an HDF5 file with room for arrays; return the offset of each in the file, in bytes."""
    h5py = import_package("h5py", f"{path}: writing HDF5", "data")
    try:
        with h5py.File(path, "x") as file:
            offsets = {}
            for name, array in arrays.items():
                room = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                room.set_layout(h5py.h5d.CONTIGUOUS)
                room.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
                room.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
                made = h5py.h5d.create(
                    file.id,
                    name.encode(),
                    h5py.h5t.py_create(array.dtype, logical=True),
                    h5py.h5s.create_simple(array.shape),
                    room,
                )
                offsets[name] = made.get_offset()
                # NetCDF has no attributes of several dimensions, such as affine maps.
                given = array.attributes.items()
                flat = {key: np.ravel(v) if np.ndim(v) > 1 else v for key, v in given}
                file[name].attrs.update(flat)
                if array.coordinates:
                    _add_coordinates(file, name, array)
    except RuntimeError as error:  # HDF5's own, where the file is closed on a full disk
        raise OSError(errno.EIO, str(error)) from error
    return offsets


def _add_coordinates(file: Any, name: str, array: Description) -> None:
    """Give the dimensions of an array in an HDF5 file their coordinates, as NetCDF does."""
    for d, size in enumerate(array.shape):
        own = array.coordinates.get(d)
        if own is None or own.name == name:
            # Where some dimensions have names, NetCDF's library needs one for all.
            own = Coordinate(f"{name}_dimension_{d}", np.zeros(size, ">f4"), {})
            label = f"This is a netCDF dimension but not a netCDF variable.{size:10d}"
        else:
            label = own.name
        if own.name not in file:
            file[own.name] = own.values
            file[own.name].attrs.update(own.attributes)
            file[own.name].make_scale(label)
        file[name].dims[d].attach_scale(file[own.name])


def create_npy(path: Path, array: Description) -> int:
    """Make a `.npy` file with room for an array; return its offset in the file, in bytes."""
    made = np.lib.format.open_memmap(path, "w+", array.dtype, array.shape)
    offset: int = made.offset
    del made
    return offset


def write_box(
    path: Path, offset: int, shape: tuple[int, ...], box: Box, values: NDArray[Any]
) -> None:
    """Write `values`, a box of an array of this shape, to a file, and bring it to the disk.

    The array begins at byte `offset`; `values` are contiguous. Not collective: processes may write
    disjoint boxes at the same time.
    """
    try:
        # Without reading: of a page on a remote disk that is known in part, only that part is
        # written.
        descriptor = os.open(path, os.O_WRONLY)
    except FileNotFoundError as error:
        raise unseen(path) from error
    try:
        for index, run in _runs(shape, box, values):
            write_at(descriptor, run, offset + index * values.itemsize)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_at(descriptor: int, values: NDArray[Any], position: int) -> None:
    """Write a contiguous, one-dimensional array to a file, `position` bytes from its beginning."""
    left = memoryview(values.view(np.uint8).data)
    while left:
        written = os.pwrite(descriptor, left, position)
        left, position = left[written:], position + written


def _runs(shape: tuple[int, ...], box: Box, values: NDArray[Any]) -> Any:
    """Yield each contiguous run of a box: its flat start index in the array, and its values."""
    # Beyond this dimension the box covers the whole array.
    last = len(shape) - 1
    while last > 0 and box.shape[last] == shape[last]:
        last -= 1
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    rows = values.reshape(-1, prod(box.shape[last:]))
    begin = sum(a * stride for a, stride in zip(box.start, strides, strict=True))
    for row, index in zip(rows, np.ndindex(*box.shape[:last]), strict=True):
        # Beyond the last stride, which belongs to the run itself.
        yield begin + sum(i * n for i, n in zip(index, strides, strict=False)), row
