"""Files of each format, into which ranks write boxes of an array in parallel."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distconv.data.durable import sync, sync_folder, unseen
from distconv.data.sources.interface import Coordinate, import_package
from distconv.geometry.layout import Box, Cuts, block, owning_part
from distconv.geometry.topology import Topology


@dataclass(frozen=True)
class Description:
    """An array to be written to a file.

    Attributes
    ----------
    chunks: the extents of a chunk; zarr only.
    order: the dimensions in the order in which the file stores them; None for the same order.
    attributes, coordinates: as in `Source`; some formats keep some or none.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    coordinates: Mapping[int, Coordinate] = field(default_factory=dict)


# HDF5 and `.npy`. Both formats store an array contiguously, at an offset that is known once the
# file is created. So ranks write disjoint bytes by calls of the operating system, without an HDF5
# library that supports MPI.


def create_hdf5(path: Path, arrays: Mapping[str, Description]) -> dict[str, int]:
    """Create an HDF5 file with room for arrays; return the offset of each by name, in bytes."""
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
    except RuntimeError as error:  # raised by HDF5 on closing the file if the disk is full
        raise OSError(errno.EIO, str(error)) from error
    return offsets


def _add_coordinates(file: Any, name: str, array: Description) -> None:
    """Write the coordinates of an array's dimensions to an HDF5 file, as NetCDF does."""
    for d, size in enumerate(array.shape):
        own = array.coordinates.get(d)
        if own is None or own.name == name:
            # If some dimensions have names, NetCDF's library needs names for all dimensions.
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
    """Create a `.npy` file with room for an array; return the array's offset, in bytes."""
    made = np.lib.format.open_memmap(path, "w+", array.dtype, array.shape)
    offset: int = made.offset
    del made
    return offset


def write_box(
    path: Path, offset: int, shape: tuple[int, ...], box: Box, values: NDArray[Any]
) -> None:
    """Write `values`, a box of an array of shape `shape`, to a file, and flush them to the disk.

    The array begins at byte `offset`; `values` are contiguous. Not collective: processes may write
    disjoint boxes at the same time.
    """
    try:
        # Write-only: if a process has written part of a page of a remote file, then only this part
        # is sent to the server, not the bytes of other ranks.
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
    # Beyond dimension `last` the box has the full extents of the array.
    last = len(shape) - 1
    while last > 0 and box.shape[last] == shape[last]:
        last -= 1
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    rows = values.reshape(-1, prod(box.shape[last:]))
    begin = sum(a * stride for a, stride in zip(box.start, strides, strict=True))
    for row, index in zip(rows, np.ndindex(*box.shape[:last]), strict=True):
        # The strides of dimension `last` and beyond are within the run.
        yield begin + sum(i * n for i, n in zip(index, strides, strict=False)), row


# NIfTI and TIFF, and files that are compressed once complete.
#
# NIfTI and TIFF files store an array contiguously, like HDF5 files here. Ranks cannot write boxes
# of a compressed file: the file is first written without compression, and one rank compresses it.


_PIECE = 2**22
"""The number of bytes that are read and compressed at a time."""


def stored_order(kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dimensions of an array (1, channels, *space) in the order of storage in a file.

    NIfTI stores elements along the first dimension of space contiguously, TIFF along the last.
    `kind` is "nifti" or "tiff". Raises ValueError for other shapes.
    """
    if len(shape) not in (4, 5) or shape[0] != 1:
        raise ValueError(
            f"the shape is {shape}; a file of this format holds one sample, (1, channels, height, "
            "width) or (1, channels, depth, height, width). Write .zarr or .h5, or a file for "
            "each sample"
        )
    space = tuple(range(2, len(shape)))
    return (0, 1, *(reversed(space) if kind == "nifti" else space))


def create_nifti(path: Path, array: Description) -> int:
    """Create a NIfTI file with room for an array; return the offset of the array, in bytes.

    The attributes "affine" (or else "spacing") and "unit" are written. Channels are the last
    dimension, as in MONAI and nnU-Net; a single channel has no dimension. Raises ValueError for a
    type that NIfTI does not support.
    """
    nibabel: Any = import_package("nibabel", f"{path}: writing it", "nifti")
    _, channels, *space = array.shape
    extents = tuple(space)
    if channels > 1:
        extents = (*space, *(1,) * (3 - len(space)), channels)
    given = array.attributes
    header = nibabel.Nifti2Header() if max(extents) > 2**15 - 1 else nibabel.Nifti1Header()
    try:
        header.set_data_dtype(array.dtype)
    except nibabel.spatialimages.HeaderDataError as error:
        raise ValueError(
            f"{path}: NIfTI has no {array.dtype}; convert the tensor, for example to uint8"
        ) from error
    header.set_data_shape(extents)
    spacing = given.get("spacing")
    if "affine" in given:
        affine = np.array(given["affine"], float)
        spacing = np.sqrt((affine[:3, : len(space)] ** 2).sum(0))
        header.set_sform(affine, code="scanner")
        header.set_qform(affine, code="scanner", strip_shears=True)
    if spacing is not None:
        header.set_zooms((*map(float, spacing), *(1.0,) * (len(extents) - len(space))))
    if given.get("unit") in ("mm", "meter", "micron"):
        header.set_xyzt_units(given["unit"])
    header["magic"] = header.single_magic
    offset = header.single_vox_offset
    header["vox_offset"] = offset
    with open(path, "xb") as file:
        file.write(header.binaryblock)
        file.truncate(offset + prod(array.shape) * array.dtype.itemsize)
    return int(offset)


def create_tiff(path: Path, array: Description) -> int:
    """Create an OME-TIFF file with room for an array; return the offset of the array, in bytes.

    The attribute "spacing" is written, in micrometres. The file has one page without compression
    per plane. Raises ValueError for a type that TIFF does not support.
    """
    tifffile: Any = import_package("tifffile", f"{path}: writing it", "tiff")
    names = "CZYX" if len(array.shape) == 5 else "CYX"
    metadata: dict[str, Any] = {"axes": names}
    spacing = array.attributes.get("spacing", ())
    micrometres = {"mm": 1000.0, "meter": 1e6}.get(array.attributes.get("unit", ""), 1.0)
    for name, distance in zip(names[1:], spacing, strict=False):
        metadata[f"PhysicalSize{name}"] = distance * micrometres
    try:
        made = tifffile.memmap(
            path,
            shape=array.shape[1:],
            dtype=array.dtype,
            ome=True,
            bigtiff=True,
            photometric="minisblack",
            metadata=metadata,
        )
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{path}: TIFF has no {array.dtype}; convert the tensor, for example to uint8"
        ) from error
    offset: int = made.offset
    del made
    return offset


def compresses(path: Path) -> bool:
    """Return whether the suffix of `path` asks to compress or pack the complete file."""
    return path.name.endswith((".nii.gz", ".npz"))


def compress(partial: Path, target: Path, path: Path, name: str) -> None:
    """Write the file `partial` to `target`, compressed (`.nii.gz`) or packed (`.npz`) as `path` is.

    `name` is the name of the array in a `.npz` file.
    """
    if path.suffix == ".npz":
        with zipfile.ZipFile(target, "x", zipfile.ZIP_STORED) as archive:
            archive.write(partial, f"{name}.npy")
        descriptor = os.open(target, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        return
    with open(partial, "rb") as plain, open(target, "xb") as file:
        with gzip.GzipFile(path.stem, "wb", compresslevel=4, fileobj=file, mtime=0) as packed:
            shutil.copyfileobj(plain, packed, _PIECE)
        file.flush()
        os.fsync(file.fileno())


# Zarr: ranks that share a chunk write in turns.


_LARGEST = 2**24
"""The largest size of a default chunk, in bytes."""


def default_chunks(
    shape: tuple[int, ...], cuts: Cuts, topology: Topology, itemsize: int
) -> tuple[int, ...]:
    """Return the extents of default chunks of an array, samples first.

    A chunk has at most 16 MiB of one sample, and is within the block of one rank if possible.
    """
    chunks = [block(n, topology.parts(axes), 0)[1] for n, axes in zip(shape, cuts, strict=True)]
    chunks[0] = 1
    while prod(chunks) * itemsize > _LARGEST:
        longest = chunks.index(max(chunks))
        divisor = next((f for f in (2, 3, 5, 7) if chunks[longest] % f == 0), 2)
        chunks[longest] = -(-chunks[longest] // divisor)
    return tuple(chunks)


def turns(
    shape: tuple[int, ...],
    cuts: Cuts,
    topology: Topology,
    chunks: tuple[int, ...],
    start: tuple[int, ...],
) -> tuple[int, ...]:
    """Return for each dimension the number of turns in which its blocks are written to zarr.

    The blocks partition a tensor of `shape` that begins at index `start` of the array, which has
    chunks of extents `chunks`. Blocks along a dimension whose indices are equal modulo the number
    of turns share no chunk and are written in the same turn. One turn is enough if all blocks begin
    at the start of a chunk.
    """
    return tuple(
        _turns_along(n, topology.parts(axes), chunk, first)
        for n, axes, chunk, first in zip(shape, cuts, chunks, start, strict=True)
    )


def turn_of(rank: int, cuts: Cuts, topology: Topology, turns: tuple[int, ...]) -> int:
    """Return the turn, from 0, in which `rank` writes its block.

    `turns` has the number of turns of each dimension, from the function `turns`.
    """
    coordinates = topology.coordinates(rank)
    turn = 0
    for axes, count in zip(cuts, turns, strict=True):
        turn = turn * count + topology.part(coordinates, axes) % count
    return turn


def create_zarr(path: Path, arrays: Mapping[str | None, Description]) -> None:
    """Create a zarr folder of format 3: an array under the only name None, or a group of arrays."""
    zarr = _zarr(path)
    group = None if None in arrays else zarr.open_group(str(path), mode="w-")
    for name, array in arrays.items():
        kind = {"shape": array.shape, "dtype": array.dtype, "chunks": array.chunks}
        kind["attributes"] = dict(array.attributes)
        if group is None:
            zarr.create_array(str(path), **kind)
        else:
            group.create_array(name, **kind)
    sync_tree(path)


def write_chunks(path: Path, name: str | None, box: Box, values: NDArray[Any]) -> None:
    """Write a box of an array in a zarr folder, and flush the chunks to the disk.

    `name` is the array's name in the folder; None if the folder is the array. Not collective. A
    chunk that the box covers in part is read and rewritten, so no other process may write to this
    chunk at the same time.
    """
    if not path.exists():
        raise unseen(path)
    array = _zarr(path).open_array(str(path), path=name, mode="r+")
    folder = path if name is None else path / name
    along = (
        [(i, max(start, i * n), min(stop, (i + 1) * n)) for i in range(start // n, -(-stop // n))]
        for start, stop, n in zip(box.start, box.stop, array.chunks, strict=True)
    )
    for runs in product(*along):
        place, low, high = zip(*runs, strict=True)
        part = Box(low, high)
        # One chunk at a time: after the failure of one of several chunks, zarr would write the
        # others in the background.
        array[part.slices] = values[part.slices_within(box)]
        chunk = folder / array.metadata.encode_chunk_key(place)
        if chunk.exists():  # zarr writes no chunk in which all values are the fill value
            sync(chunk)


def sync_tree(path: Path) -> None:
    """Flush the names of all files in a zarr folder, and its top-level .json files, to the disk."""
    for folder in (path, *(found for found in path.rglob("*") if found.is_dir())):
        sync_folder(folder)
    for found in path.glob("*.json"):
        sync(found)


def _turns_along(size: int, parts: int, chunk: int, first: int) -> int:
    most = 1
    for part in range(min(parts, size)):
        _, stop = block(size, parts, part)
        end = min(-(-(first + stop) // chunk) * chunk - first, size)
        most = max(most, owning_part(size, parts, end - 1) - part + 1)
    return most


def _zarr(path: Path) -> Any:
    zarr = import_package("zarr", f"{path}: writing zarr", "data")
    if not hasattr(zarr, "create_array"):
        raise ImportError(
            f"{path}: writing zarr needs zarr 3, but zarr {zarr.__version__} is installed; pip "
            "install 'zarr>=3'"
        )
    return zarr
