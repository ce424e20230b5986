"""Samples in many files of one kind, as one source."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from threading import Lock

from distconv.data.sources.arrays import check_unchanged, facts_of_file
from distconv.data.sources.interface import Array, Source
from distconv.geometry.layout import Box

_OPEN = 16
"""The number of files that are kept open."""


class FilesSource(Source):
    """A source on many files, in order: a sample in each file, or several.

    Parameters
    ----------
    paths: the files.
    open_file: takes the path of a file, and returns a source on it: of one sample, unless
        `stacked`.
    stacked: whether each file holds any number of samples. All are opened at once, to count them.

    Opening a file raises ValueError if its samples have another shape or type than the first
    file's.
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
        """Return the names of the files, the number of samples, and the facts of up to 8 files."""
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
        """Return the source on file number `place`; the last ones used stay open."""
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
    """Raise `ValueError` unless the source on one of several files is of one sample."""
    if source.samples != 1:
        raise ValueError(
            f"{path} holds {source.samples} samples; expected one in each file. Pass "
            "open_files(pattern, field, stacked=True) for several"
        )
