"""How far a command has come: a line on the terminal, and the rows so far on an interrupt."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from distconv.grid.interrupt import last_words

Row = TypeVar("Row")


_SELDOM = 10.0
"""Seconds from one line to the next where stderr is no terminal."""


class StatusLine:
    """How far a command has come, on stderr: one line that changes, or now and then another one.

    Parameters
    ----------
    first: whether this is the rank that prints.
    """

    def __init__(self, first: bool = True):
        self._first, self._terminal = first, first and sys.stderr.isatty()
        self._last = time.monotonic()

    def __call__(self, text: str) -> None:
        """Show a line in place of the one before; none for no text."""
        if self._terminal:
            print(f"\r\033[K{text[:79]}", end="", file=sys.stderr, flush=True)
        elif self._first and text and time.monotonic() > self._last + _SELDOM:
            self._last = time.monotonic()
            print(text, file=sys.stderr, flush=True)


class Progress(Generic[Row]):
    """Rows as they come: their number and the last one on stderr.

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
        self._line = StatusLine(first)
        self._untold = threading.Semaphore()
        self._within = contextlib.ExitStack()

    def __call__(self, row: Row) -> None:
        """Take one more row."""
        self.rows.append(row)
        self._line(f"{len(self.rows)}: {self._name(row)}")

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
        self._line("")
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._tell()

    def _tell(self) -> None:
        """Show the rows so far, once."""
        if self._first and self._untold.acquire(blocking=False):
            self._show(list(self.rows))
            sys.stdout.flush()
