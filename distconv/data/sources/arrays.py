"""Sources on objects indexed like NumPy arrays: arrays, memory maps, zarr."""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from distconv.data.sources.interface import Array, Source, import_package, reading
from distconv.data.sources.packing import ScaleAndOffset, put, user_attributes
from distconv.geometry.layout import Box

_BLOCKS, _BLOCK = 8, 4096
"""The number and size, in bytes, of the blocks of a file that ranks compare."""

_SMALL = 2**24
"""The largest size in bytes of an array in memory, such as labels, that ranks compare in full."""


class ArraySource(Source):
    """A source on an array with `shape`, `dtype` and indexing by slices, samples first.

    The type of the source is the type of an element read from the array, because some packages
    scale values on reading. Attributes of the array (`attrs`) are applied as in `ScaleAndOffset`.

    Parameters
    ----------
    array: the array.
    name: the name for error messages.
    single: whether the array is one sample, without a dimension for samples.
    check: called before and after each read; raises if the file has changed.
    path: the file or zarr folder of the array; None for other arrays.
    """

    def __init__(
        self,
        array: Any,
        name: str,
        single: bool = False,
        check: Callable[[], None] | None = None,
        path: Path | None = None,
    ) -> None:
        self.name, self._path = name, path
        self._array, self._single, self._check = array, single, check
        shape = tuple(map(int, array.shape))
        if not shape and not single:
            raise ValueError(f"{name} is a single number; expected an array of samples")
        self.samples, self.shape = (1, shape) if single else (shape[0], shape[1:])
        attributes = dict(getattr(array, "attrs", {}))
        fill = getattr(array, "fill_value", None)
        if "_ARRAY_DIMENSIONS" in attributes and fill is not None:
            # In zarr format 2, xarray and NetCDF store `_FillValue` as zarr's fill value, and mark
            # their arrays by `_ARRAY_DIMENSIONS`.
            attributes.setdefault("_FillValue", fill)
        self._packing = ScaleAndOffset(attributes, name)
        self.attributes = user_attributes(attributes)
        self.dtype = self._type()
        chunks = getattr(array, "chunks", None)
        # Chunks of dask arrays are tuples of extents, as dask's chunks may differ in extent.
        if chunks and all(isinstance(extent, int) for extent in chunks):
            self.chunks = (1, *chunks) if single else tuple(chunks)
        self.check_numbers()

    def _type(self) -> np.dtype[Any]:
        if isinstance(self._array, np.ndarray) or not (self.samples and prod(self.shape)):
            return np.dtype(self._array.dtype).newbyteorder("=")
        one = np.asarray(self._read(0, Box((0,) * len(self.shape), (1,) * len(self.shape))))
        return self._packing.unpacked(np.empty(0, one.dtype)).dtype.newbyteorder("=")

    def _read(self, sample: int, box: Box) -> Any:
        try:
            return self._array[box.slices if self._single else (sample, *box.slices)]
        except Exception as error:
            raise OSError(
                f"{self.name}: cannot read sample {sample}: {error or type(error).__name__}; "
                "create or copy it again"
            ) from error

    def facts(self) -> dict[str, str]:
        """Return facts for ranks to compare, with checksums of some values or parts of the file."""
        facts = super().facts()
        if self._path is not None and self._path.is_file():
            facts |= facts_of_file(self._path)
        elif isinstance(self._array, np.ndarray) and self._array.nbytes <= _SMALL:
            # If samples are partitioned, comparing mini-batches does not detect different labels.
            number = crc32(self._array.tobytes())
            facts[f"checksum of {self.name}"] = f"{number:08x}"
        elif self._path is not None or isinstance(self._array, np.ndarray):
            facts |= self.first_values()  # other objects may compute values on reading
        return facts

    def read_into(self, out: Array, sample: int, box: Box) -> None:
        if self._check is not None:
            # A read beyond the end of a memory-mapped file kills the process.
            self._check()
        put(out, self._packing.unpacked(self._read(sample, box)), self.name)
        if self._check is not None:
            self._check()


def open_npy(path: Path, single: bool = False) -> ArraySource:
    """Return a source on a `.npy` file, as a memory map; `single` if the array is one sample.

    Raises OSError for a file that is missing, truncated, or not readable.
    """
    check_file(path, "a .npy file")
    with reading(path, ".npy file of numbers", OSError, ValueError, EOFError):
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    return ArraySource(array, path.name, single, unwritten_check(path), path)


def open_npz(path: Path, name: str | None, single: bool = False) -> ArraySource:
    """Return a source on an array in a `.npz` file; `single` if the array is one sample.

    An array written by `numpy.savez` is a memory map, of which any box can be read without other
    elements. An array written by `numpy.savez_compressed` is decompressed into memory on opening.

    `name` is the name of the array; None if there is only one array. Raises OSError for a file that
    is missing or damaged, and ValueError for an unknown name.
    """
    check_file(path, "a .npz file")
    check = unwritten_check(path)
    errors = OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile
    with reading(path, ".npz file of numbers", *errors), zipfile.ZipFile(path) as archive:
        members = {found.filename.removesuffix(".npy"): found for found in archive.infolist()}
    name = only_name(path, name, list(members))
    with reading(path, ".npz file of numbers", *errors):
        array: Any = _mapped(path, members[name])
        if array is None:
            array = np.load(path, allow_pickle=False)[name]
    source = ArraySource(array, f"{name!r} of {path.name}", single, check, path)
    if not isinstance(array, np.memmap):
        source.chunks = (source.samples, *source.shape)
    return source


def _mapped(path: Path, member: zipfile.ZipInfo) -> Any:
    """Return an array in a `.npz` file as a memory map; None if it is compressed."""
    if member.compress_type != zipfile.ZIP_STORED:
        return None
    with open(path, "rb") as file:
        file.seek(member.header_offset + 26)  # where the header has the lengths of name and extra
        name, extra = struct.unpack("<HH", file.read(4))
    return npy_at(path, member.header_offset + 30 + name + extra)


def npy_at(path: Path, offset: int) -> Any:
    """Return the array in `.npy` format that begins at byte `offset` of a file, as a memory map.

    Raises ValueError unless a `.npy` array without Python objects begins there.
    """
    with open(path, "rb") as file:
        file.seek(offset)
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0
        if version != (1, 0):
            read = np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        if dtype.hasobject:
            raise ValueError("it holds Python objects")
        return np.memmap(path, dtype, "r", file.tell(), shape, "F" if fortran else "C")


def open_zarr(path: Path, name: str | None, single: bool = False) -> ArraySource:
    """Return a source on an array in a zarr folder; `single` if the array is one sample.

    Formats 2 and 3 are supported, and zip files of zarr folders, `.zarr.zip`. Missing chunks hold
    the array's fill value, by default 0, as in zarr.

    `name` is the name of the array in a group, such as "images/0"; None if the folder is an array,
    or a group with a single array. Raises OSError for a folder that is missing or damaged, and
    ValueError for an unknown name.
    """
    zarr = import_package("zarr", f"{path}: reading zarr", "data")
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such folder; expected a zarr folder")
    place = zarr.storage.ZipStore(path) if path.suffix == ".zip" else str(path)
    return _zarr_at(place, path, name, single)


def open_zarr_url(url: str, name: str | None) -> ArraySource:
    """Return a source on a zarr array, or a group of arrays, in an object store.

    `url` is a URL of fsspec, such as "s3://bucket/train.zarr"; `name` is as for `open_zarr`. Raises
    ImportError if the package for this kind of store is not installed.
    """
    import_package("zarr", f"{url}: reading zarr", "remote")
    import_package("fsspec", f"{url}: reading an object store", "remote")
    return _zarr_at(url, Path(url), name, False)


def _zarr_at(place: Any, path: Path, name: str | None, single: bool) -> ArraySource:
    """Return a source on an array in the zarr store `place`: a path, a URL, or a store of zarr.

    Error messages name `path`; `name` and `single` are as for `open_zarr`.
    """
    zarr = import_package("zarr", f"{path}: reading zarr", "data")
    try:
        found: Any = zarr.open(place, mode="r")
        arrays = None if hasattr(found, "shape") else dict(found.arrays())
        if arrays is not None and name is not None and "/" in name and name in found:
            arrays[name] = found[name]
    except ImportError as error:
        raise ImportError(f"{place}: {error}") from error
    except Exception as error:
        raise OSError(
            f"{place}: not a whole zarr folder; create or copy it again ({error})"
        ) from error
    if arrays is None:
        if name is not None:
            raise ValueError(
                f"{place} is a single array and has no member {name!r}; leave out the name"
            )
        return ArraySource(found, path.name, single, path=path)
    name = only_name(path, name, sorted(arrays))
    return ArraySource(arrays[name], f"{name!r} of {path.name}", single, path=path)


def only_name(path: Path, name: str | None, names: list[str]) -> str:
    """Return `name`, or the only entry of `names` if `name` is None.

    Raises ValueError, naming `path`, if `name` is not in `names`, or if `name` is None and `names`
    has several entries or none.
    """
    if name is None:
        if len(names) != 1:
            raise ValueError(f"{path} holds {names}; choose one by inputs= and targets=")
        return names[0]
    if name not in names:
        raise ValueError(f"{path}: no dataset {name!r}; choose from {names}")
    return name


def check_file(path: Path, kind: str) -> None:
    """Raise `OSError` unless `path` is a file.

    `kind` is the expected kind of file, such as "a .npy file", for the message about a folder.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; pass the path of {kind} in it")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")


def facts_of_file(path: Path) -> dict[str, str]:
    """Return the size of a file and a checksum of 8 evenly spaced blocks, for ranks to compare.

    The comparison detects different files under one path on several nodes, such as
    `/tmp/train.npy`.
    """
    size = path.stat().st_size
    number = 0
    with open(path, "rb") as file:
        for i in range(_BLOCKS):
            file.seek(i * max(0, size - _BLOCK) // (_BLOCKS - 1))
            number = crc32(file.read(_BLOCK), number)
    return {f"size of {path.name}": f"{size} bytes", f"checksum of {path.name}": f"{number:08x}"}


def unwritten_check(path: Path) -> Callable[[], None]:
    """Return a function that raises OSError if a file has changed since `unwritten_check(path)`."""
    before = os.stat(path)
    return lambda: check_unchanged(path, before, os.stat(path))


def check_unchanged(path: Path, before: os.stat_result, now: os.stat_result) -> None:
    """Raise `OSError` if a file has changed between the `os.stat` results `before` and `now`."""
    # Reads beyond the end of a file return zeros or kill the process. A file that is overwritten in
    # place has old and new values.
    if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        later = (now.st_mtime_ns - before.st_mtime_ns) / 1e9
        raise OSError(
            f"{path}: changed while it was read, from {before.st_size} to {now.st_size} bytes, "
            f"and written to {later:.3g} s later; create or copy the file again, and do not write "
            "to it while it is in use"
        )
