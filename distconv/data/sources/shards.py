"""A source on a shard of WebDataset: a tar file with the fields of each sample as files."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import numpy as np

from distconv.data.sources.arrays import check_file, check_unchanged, facts_of_file, npy_at
from distconv.data.sources.interface import Array, Source
from distconv.data.sources.packing import put
from distconv.geometry.layout import Box

_READ = (".npy", ".cls")


class ShardSource(Source):
    """A source on one field of the samples in a tar file, in the order of the file.

    The files of a sample have a name in common, up to the first point: `0001.image.npy` and
    `0001.cls` are the fields "image.npy" and "cls" of the sample 0001. An array `.npy` is read by
    boxes, and `.cls` is a whole number.

    Parameters
    ----------
    path: the tar file, without compression.
    field: the name of the field; None for the only one.

    Raises OSError for a file that is missing or damaged, and ValueError for a field that is missing
    in a sample, or cannot be read.
    """

    def __init__(self, path: Path, field: str | None = None) -> None:
        check_file(path, "a .tar file")
        self._path, self._before = path, os.stat(path)
        try:
            with tarfile.open(path, "r:") as archive:
                members = [m for m in archive if m.isfile()]
        except (tarfile.TarError, EOFError) as error:
            raise OSError(
                f"{path}: not a whole .tar file without compression; make or copy it again "
                f"({error})"
            ) from error
        samples: dict[str, dict[str, tuple[int, int]]] = {}
        for member in members:
            folder, _, name = member.name.rpartition("/")
            key, _, kind = name.partition(".")
            samples.setdefault(f"{folder}/{key}", {})[kind] = member.offset_data, member.size
        names = sorted({name for found in samples.values() for name in found})
        if field is None and len(names) == 1:
            field = names[0]
        if field not in names or not f".{field}".endswith(_READ):
            raise ValueError(
                f"{path} has the fields {names}; name one in .npy or .cls by inputs= and targets="
            )
        missing = next((key for key, found in samples.items() if field not in found), None)
        if missing is not None:
            raise ValueError(f"{path}: sample {missing.lstrip('/')} has no {field!r}")
        self._places = [found[field] for found in samples.values()]
        self._text = not f".{field}".endswith(".npy")
        self.name, self.samples = f"{field!r} of {path.name}", len(self._places)
        first = self._value(0)
        self.shape, self.dtype = first.shape, first.dtype.newbyteorder("=")
        self.check_numbers()

    def read_into(self, out: Array, sample: int, box: Box) -> None:
        value = self._value(sample)
        if value.shape != self.shape:
            raise ValueError(
                f"{self.name} is {value.shape} in sample {sample}, and {self.shape} in sample 0; "
                "expected the same in all samples"
            )
        put(out, value[box.slices], self.name)
        check_unchanged(self._path, self._before, os.stat(self._path))

    def facts(self) -> dict[str, str]:
        """Return the size of the file, and a checksum of parts of it."""
        return super().facts() | facts_of_file(self._path)

    def _value(self, sample: int) -> Array:
        offset, size = self._places[sample]
        try:
            if not self._text:
                return npy_at(self._path, offset)
            with open(self._path, "rb") as file:
                file.seek(offset)
                return np.array(int(file.read(size)))
        except (ValueError, EOFError) as error:
            raise OSError(f"{self.name}: sample {sample} is damaged ({error})") from error
