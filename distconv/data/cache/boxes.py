"""Boxes of samples, kept in memory or in a file on a disk of the node."""

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
    """Arrays kept as they are, which must not change any more: each is its own key."""

    def add(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the array."""
        return values

    get = add

    def drop(self, place: NDArray[Any]) -> None:
        """Do nothing: nobody else holds the array."""


@dataclass(frozen=True)
class _Slot:
    offset: int
    bytes: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class BoxesInFolder:
    """Arrays in a file without a name, which disappears when the process ends, however it ends.

    Arrays are kept under the keys that `add` returns. Any thread may call the methods.

    `folder` is a folder on a disk of this node; it is made where it is missing. Raises OSError
    where nothing can be written there.
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
        """Write the array. Raises OSError where the disk is full."""
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
        """Return the array as a memory map: only the elements that are looked at are read."""
        flat = np.memmap(self._file, place.dtype, "r", place.offset, place.shape or (1,))
        return flat.reshape(place.shape)

    def drop(self, place: _Slot) -> None:
        """Free the place of an array for another of its size."""
        with self._lock:
            self._free.setdefault(place.bytes, []).append(place.offset)
