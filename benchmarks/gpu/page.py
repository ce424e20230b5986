"""The page of results, written anew after every measurement, with the failures."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from mpi4py import MPI

from benchmarks.measuring.report import Row, as_table
from distconv.device.kinds import accelerator


class Part(NamedTuple):
    """A measurement of its own: if it fails, the others are still made."""

    name: str
    run: Callable[[], Iterable[Row | str]]
    """Yields rows, and lines to stand below the table."""


class Page:
    """A file that rank 0 writes again whenever there is something new; all ranks fill it.

    Parameters
    ----------
    path: the path of the file.
    text: its first lines.
    """

    def __init__(self, path: Path, text: str):
        self._path, self._text = path, text
        self.failures: list[str] = []

    def add(self, name: str, parts: Iterable[Part], end: float) -> None:
        """Add a section with the results of all parts that begin before `end` on the clock.

        On one rank, an exception of a part is written into the page. On several, it ends the job,
        as the other ranks would wait.
        """
        rows: list[Row] = []
        notes: list[str] = []
        for part in parts:
            failure = None
            open_end = f"{part.name}: begun, and not finished"
            self._write(name, rows, [*notes, open_end])
            try:
                if MPI.COMM_WORLD.bcast(time.perf_counter() > end):
                    raise TimeoutError("the time is up")
                for found in part.run():
                    if isinstance(found, Row):
                        rows.append(found)
                    else:
                        notes.append(found)
                    self._write(name, rows, [*notes, open_end])
            except Exception as error:
                if MPI.COMM_WORLD.size > 1 and not isinstance(error, TimeoutError):
                    raise
                traceback.print_exc()
                failure = f"{part.name}: {type(error).__name__}: {error}".splitlines()[0]
            if failure:
                notes.append(f"FAILED {failure}")
                self.failures.append(failure)
            gc.collect()
            if accelerator():
                torch.get_device_module().empty_cache()
        self._text = self._write(name, rows, notes)

    def _write(self, name: str, rows: list[Row], notes: list[str]) -> str:
        tables = [as_table(rows)] if rows else []
        body = "\n\n".join([*tables, *notes])
        text = f"{self._text}\n## {name}\n\n```\n{body}\n```\n"
        if MPI.COMM_WORLD.rank == 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(text)
        return text
