"""A file of samples that all ranks write: HDF5, each field of the samples one array in it.

Rank 0 makes the file with room for all, under a fresh name; ranks write boxes that do not overlap;
when everything is on the disk, the file takes its name. So a file under its name is whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np
from numpy.typing import NDArray

import distconv as dc
from distconv.data import on_rank_zero, together
from distconv.data.durable import (
    fresh_name,
    move_into_place,
    remove,
    remove_partial,
    sync,
)
from distconv.data.sources.hdf5 import open_hdf5
from distconv.data.writing.formats import Description, create_hdf5, write_box
from examples.generating.room import check_room

Made = TypeVar("Made")

_OVERHEAD = 2**16
"""An upper bound for the bytes of HDF5's metadata for a few arrays."""


class SampleFile:
    """The unfinished file; each rank has one of these.

    Attributes:
        facts: the attributes that the file gets at the end, from rank 0.
    """

    def __init__(
        self, path: Path, arrays: Mapping[str, Description], offsets: Mapping[str, int]
    ) -> None:
        self._path, self._arrays, self._offsets = path, arrays, offsets
        self.facts: dict[str, Any] = {}

    def write(self, name: str, start: Sequence[int], values: NDArray[Any]) -> None:
        """Write the box of an array that begins at `start` to the disk. Not collective."""
        array = self._arrays[name]
        box = dc.Box(tuple(start), tuple(a + n for a, n in zip(start, values.shape, strict=True)))
        values = np.ascontiguousarray(values, array.dtype)
        if values.size:
            write_box(self._path, self._offsets[name], array.shape, box, values)


@contextmanager
def create_samples(
    grid: dc.ProcessGrid,
    path: Path,
    arrays: Mapping[str, tuple[Sequence[int], Any]],
    facts: Mapping[str, Any],
) -> Iterator[SampleFile]:
    """Make a file in a `with` block, in which all ranks write. Collective.

    Args:
        path: as for `new_file`.
        arrays: shape, samples first, and type of each field by name.
        facts: the properties of the samples: attributes of the file.

    Raises:
        DataError: as `new_file` does.
    """
    described = {n: Description(tuple(shape), np.dtype(d)) for n, (shape, d) in arrays.items()}
    size = sum(prod(array.shape) * array.dtype.itemsize for array in described.values())

    def finish(partial: Path) -> None:
        with h5py.File(partial, "r+") as file:
            file.attrs.update(opened.facts)

    def make(partial: Path) -> dict[str, int]:
        return create_hdf5(partial, described)

    with new_file(grid, path, size + _OVERHEAD, make, finish) as (partial, offsets):
        opened = SampleFile(partial, described, offsets)
        opened.facts |= facts
        yield opened


@contextmanager
def new_file(
    grid: dc.ProcessGrid,
    path: Path,
    size: int,
    make: Callable[[Path], Made],
    finish: Callable[[Path], None],
) -> Iterator[tuple[Path, Made]]:
    """Give a `with` block the path of an unfinished file, in which all ranks write, and what `make`
    has returned; after the block the file takes its name. Collective.

    Args:
        path: must not exist; folders above it are made. Unfinished files of killed processes are
            removed.
        size: an upper bound for the bytes of the file.
        make: makes a file of this path, on rank 0.
        finish: completes it on rank 0, when all ranks have written.

    Raises:
        DataError: on every rank, where the file exists, or the disk has no room for it.
    """

    def prepare() -> Path:
        if path.suffix != ".h5":
            raise ValueError(f"{path} is made as an HDF5 file; give it a name that ends with .h5")
        if path.exists():
            raise FileExistsError(f"{path} exists; remove it, or choose another --output")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"{path.parent} cannot be made: {error.strerror}; choose another --output"
            ) from error
        remove_partial(path.parent, re.escape(path.name))
        check_room(path, size)
        return fresh_name(path)

    def complete() -> None:
        finish(partial)
        sync(partial)
        move_into_place(partial, path)

    partial = on_rank_zero(grid, prepare)
    try:
        yield partial, on_rank_zero(grid, lambda: make(partial))
        # Nobody writes any longer when rank 0 gives the file its name.
        together(grid, lambda: None)
        on_rank_zero(grid, complete)
    except BaseException:
        if grid.rank == 0:
            remove(partial)
        raise


def read_facts(path: Path) -> dict[str, Any]:
    """Return the properties of the samples in a file. Not collective.

    Raises:
        OSError: for a file that is missing, damaged, or may not be read.
    """
    with open_hdf5(path) as file:
        return {
            name: value.tolist() if isinstance(value, np.ndarray | np.generic) else value
            for name, value in file.attrs.items()
        }
