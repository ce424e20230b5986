"""Samples in many files of one kind, or in the files within a tar file, as one source."""

from __future__ import annotations

import os
import tarfile
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from threading import Lock

import numpy as np

from distconv.data.sources.arrays import (
    check_file,
    check_unchanged,
    facts_of_file,
    npy_at,
    unwritten_check,
)
from distconv.data.sources.interface import Array, Source, reading
from distconv.data.sources.packing import put
from distconv.geometry.layout import Box

_OPEN = 16
"""The number of files that are kept open."""


class FilesSource(Source):
    """A source on many files, in order, with one sample or several samples in each file.

    Parameters
    ----------
    paths: the files.
    open_file: takes the path of a file, and returns a source on the file, of one sample unless
        `stacked`.
    stacked: whether each file holds any number of samples. All files are then opened at once, to
        count the samples.

    The constructor or a read raises ValueError for a file with samples of another shape or type
    than in the first file, and for several samples in a file unless `stacked`.
    """

    def __init__(
        self, paths: Sequence[Path], open_file: Callable[[Path], Source], stacked: bool = False
    ) -> None:
        self._paths, self._open_file, self._stacked = list(paths), open_file, stacked
        self._opened: OrderedDict[int, Source] = OrderedDict()
        self._stats: dict[int, os.stat_result] = {}
        self._lock = Lock()
        first = open_file(self._paths[0])
        if not stacked:
            _check_single(self._paths[0], first)
        self.name = f"{first.name} and {len(paths) - 1} more" if len(paths) > 1 else first.name
        self.shape, self.dtype, self.chunks = first.shape, first.dtype, first.chunks
        self.attributes = first.attributes
        self._facts = first.facts()
        counts = [self._opened_file(i).samples if stacked else 1 for i in range(len(paths))]
        self._ends = list(accumulate(counts))
        self.samples = self._ends[-1]

    def read_into(self, out: Array, sample: int, box: Box) -> None:
        place = bisect_right(self._ends, sample)
        with self._lock:
            source = self._opened_file(place)
        source.read_into(out, sample - (self._ends[place - 1] if place else 0), box)

    def facts(self) -> dict[str, str]:
        """Return facts by name: file names, the number of samples, and facts of up to 8 files."""
        last = len(self._paths) - 1
        # Files in different folders may have the same name.
        some = {place: self._paths[place] for place in sorted({i * last // 7 for i in range(1, 8)})}
        return {
            **self._facts,
            **{
                f"{name}, file {place + 1}": fact
                for place, path in some.items()
                if path.is_file()
                for name, fact in facts_of_file(path).items()
            },
            f"files with {self.name}": ", ".join(path.name for path in self._paths),
            f"samples of {self.name}": str(self.samples),
        }

    def _opened_file(self, place: int) -> Source:
        """Return the source on file number `place`, opening the file if it is not kept open.

        Raises OSError if the file has changed since it was first opened.
        """
        source = self._opened.pop(place, None)
        if source is None:
            path = self._paths[place]
            source = self._open_file(path)
            if not self._stacked:
                _check_single(path, source)
            if (source.shape, source.dtype) != (self.shape, self.dtype):
                raise ValueError(
                    f"{path}: its samples are {source.shape} of {source.dtype}, the samples of "
                    f"{self._paths[0]} {self.shape} of {self.dtype}; expected the same in all "
                    "files"
                )
            now = os.stat(path)
            check_unchanged(path, self._stats.setdefault(place, now), now)
        self._opened[place] = source
        if len(self._opened) > _OPEN:
            self._opened.popitem(last=False)
        return source


def _check_single(path: Path, source: Source) -> None:
    """Raise `ValueError` unless `source`, on the file `path`, has one sample."""
    if source.samples != 1:
        raise ValueError(
            f"{path} holds {source.samples} samples; expected one in each file. Pass "
            "open_files(pattern, field, stacked=True) for several"
        )


# Shards of WebDataset: tar files in which each field of a sample is a file.


_READ = (".npy", ".cls")


class ShardSource(Source):
    """A source on one field of the samples in a tar file, in the order of the file.

    The names of a sample's files are equal up to the first point: `0001.image.npy` and `0001.cls`
    are the fields "image.npy" and "cls" of the sample 0001. A `.npy` file is an array, of which any
    box can be read without other elements. A `.cls` file is an integer.

    Parameters
    ----------
    path: the tar file, without compression.
    field: the name of the field; None if there is only one field.

    Raises OSError for a file that is missing or damaged, and ValueError for a field that is missing
    in a sample or has another suffix.
    """

    def __init__(self, path: Path, field: str | None = None) -> None:
        check_file(path, "a .tar file")
        self._path, self._check = path, unwritten_check(path)
        kind = ".tar file without compression"
        with reading(path, kind, tarfile.TarError, EOFError), tarfile.open(path, "r:") as archive:
            members = [m for m in archive if m.isfile()]
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
        self._check()

    def facts(self) -> dict[str, str]:
        """Return facts by name, with the size and a partial checksum of the tar file."""
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
