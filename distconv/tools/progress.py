"""How far a command has come: a line on the terminal, and the rows so far on an interrupt."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from distconv.grid.interrupt import last_words

Row = TypeVar("Row")


class Progress(Generic[Row]):
    """Rows as they come: their number and the last one on stderr, where that is a terminal.

    Within `with`, an interrupt shows all rows so far, also while this rank waits in MPI.

    Parameters
    ----------
    name: describes a row in a few words.
    show: prints the rows so far, after an interrupt.
    first: whether this is the rank that prints.
    """

    def __init__(
        self, name: Callable[[Row], str], show: Callable[[list[Row]], object], first: bool
    ):
        self.rows: list[Row] = []
        self._name, self._show, self._first = name, show, first
        self._line = first and sys.stderr.isatty()
        self._untold = threading.Semaphore()
        self._within = contextlib.ExitStack()

    def __call__(self, row: Row) -> None:
        """Take one more row."""
        self.rows.append(row)
        if self._line:
            text = f"{len(self.rows)}: {self._name(row)}"
            print(f"\r\033[K{text[:79]}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress[Row]:
        self._within.enter_context(last_words(self._tell))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._within.close()
        if self._line:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._tell()

    def _tell(self) -> None:
        """Show the rows so far, once."""
        if self._first and self._untold.acquire(blocking=False):
            self._show(list(self.rows))
            sys.stdout.flush()
