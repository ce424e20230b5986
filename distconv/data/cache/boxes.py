"""The stores for the boxes of samples that a `Cache` keeps: memory, or a file on a local disk."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distconv.data.durable import unwritable
from distconv.data.writing.contiguous import write_at


class BoxesInMemory:
    """A store of arrays in memory, without copies: an array is its own key and must not change."""

    def add(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return `values`, the key by which `Cache` gets and drops the array; nothing is copied."""
        return values

    get = add

    def drop(self, place: NDArray[Any]) -> None:
        """Do nothing: an array is freed with the last reference to it."""


@dataclass(frozen=True)
class _Slot:
    """The key of an array in a `BoxesInFolder`: its place in the file, its shape and its type."""

    offset: int
    bytes: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class BoxesInFolder:
    """A store of arrays in one unnamed file, which the system removes when the process ends.

    `add` stores an array and returns its key, by which `get` returns the array and `drop` removes
    it. Any thread may call the methods.

    `folder` is a folder on a disk of this node; it is made if it is missing. Raises OSError if it
    cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder)
        except OSError as error:
            raise unwritable(folder, error) from error
        self._lock = Lock()
        self._end = 0
        self._free: dict[int, list[int]] = {}

    def add(self, values: NDArray[Any]) -> _Slot:
        """Write an array to the file and return its key. Raises OSError if the disk is full."""
        with self._lock:
            free = self._free.get(values.nbytes)
            offset = free.pop() if free else self._end
            self._end = max(self._end, offset + values.nbytes)
        try:
            write_at(self._file.fileno(), values.reshape(-1), offset)
        except OSError as error:
            raise unwritable(self._folder, error, values.nbytes) from error
        return _Slot(offset, values.nbytes, values.shape, values.dtype)

    def get(self, place: _Slot) -> NDArray[Any]:
        """Return the array with the key `place` as a memory map: only elements in use are read."""
        flat = np.memmap(self._file, place.dtype, "r", place.offset, place.shape or (1,))
        return flat.reshape(place.shape)

    def drop(self, place: _Slot) -> None:
        """Remove the array with the key `place`; later arrays of equal size may use its space."""
        with self._lock:
            self._free.setdefault(place.bytes, []).append(place.offset)
