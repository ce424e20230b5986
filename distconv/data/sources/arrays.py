"""Samples in anything that is indexed like a numpy array: arrays, memory maps, zarr."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from distconv.data.sources.interface import Array, Source
from distconv.geometry.layout import Box


class ArraySource(Source):
    """An array with `shape`, `dtype` and indexing by slices, samples first.

    Parameters
    ----------
    array: the array.
    name: what errors call it.
    single: the array is one sample, and has no dimension for samples.
    check: called before and after each read, to raise where what is read cannot be trusted.
    """

    def __init__(
        self,
        array: Any,
        name: str,
        single: bool = False,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self._array, self._single, self._check = array, single, check
        shape = tuple(map(int, array.shape))
        if not shape and not single:
            raise ValueError(f"{name} is a single number; expected an array of samples")
        self.samples, self.shape = (1, shape) if single else (shape[0], shape[1:])
        self.dtype = np.dtype(array.dtype).newbyteorder("=")
        chunks = getattr(array, "chunks", None)
        if chunks is not None:
            self.chunks = (1, *chunks) if single else tuple(chunks)
        self.check_numbers()

    def read_into(self, out: Array, sample: int, box: Box) -> None:
        """Copy a box of one sample."""
        index = box.slices if self._single else (sample, *box.slices)
        if self._check is not None:
            # To look behind the end of a mapped file ends the process.
            self._check()
        try:
            out[...] = self._array[index]
        except Exception as error:
            raise OSError(
                f"{self.name}: cannot read sample {sample}: {error or type(error).__name__}; make "
                "or copy it again"
            ) from error
        if self._check is not None:
            self._check()


def open_npy(path: Path, single: bool = False) -> ArraySource:
    """Return the samples of a `.npy` file, of which only what is read comes into memory.

    Raises OSError for a file that is missing, truncated, or may not be read.
    """
    check_file(path, "a .npy file")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except PermissionError as error:
        raise PermissionError(f"{path}: you may not read this file ({error})") from error
    except (OSError, ValueError, EOFError) as error:
        raise OSError(
            f"{path}: not a whole .npy file of numbers; make or copy it again ({error})"
        ) from error
    size = os.stat(path).st_size

    def check() -> None:
        check_unchanged(path, size, os.stat(path).st_size)

    return ArraySource(array, path.name, single, check)


def open_zarr(path: Path, name: str | None, single: bool = False) -> ArraySource:
    """Return the samples of an array in a zarr folder, of format 2 or 3.

    Chunks that are not there are zeros, or the array's own fill value, as zarr has it.

    Parameters
    ----------
    name: the array in the group; None where the folder is an array, or a group of a single one.
    """
    try:
        import zarr
    except ImportError as error:
        raise ImportError(
            f"{path}: reading zarr needs the package zarr; pip install 'distconv[data]'"
        ) from error
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such folder")
    try:
        found: Any = zarr.open(str(path), mode="r")
        arrays = None if hasattr(found, "shape") else dict(found.arrays())
    except Exception as error:
        raise OSError(
            f"{path}: not a whole zarr folder; make or copy it again ({error})"
        ) from error
    if arrays is None:
        if name is not None:
            raise ValueError(
                f"{path} is an array of its own and holds no {name!r}; leave out names"
            )
        return ArraySource(found, path.name, single)
    name = only_name(path, name, sorted(arrays))
    return ArraySource(arrays[name], f"{name!r} of {path.name}", single)


def only_name(path: Path, name: str | None, names: list[str]) -> str:
    """Return the name of the array to read: that asked for, or the only one that there is."""
    if name is None:
        if len(names) != 1:
            raise ValueError(f"{path} holds {names}; say which by inputs= and targets=")
        return names[0]
    if name not in names:
        raise ValueError(f"{path}: no dataset {name!r}; there are {names}")
    return name


def check_file(path: Path, kind: str) -> None:
    """Raise `OSError` where there is no file at `path`."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name {kind} in it")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")


def check_unchanged(path: Path, size: int, now: int) -> None:
    """Raise `OSError` for a file that has another size than when it was opened."""
    # What lies behind the end of a file is taken for zeros, or ends the process.
    if now != size:
        raise OSError(
            f"{path}: changed while it was read, from {size} to {now} bytes; make or copy the file "
            "again, and not while it is in use"
        )
