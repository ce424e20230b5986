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


_SOON, _SELDOM = 2.0, 10.0
"""Seconds until the first line, and from one line to the next, where stderr is no terminal."""


class StatusLine:
    """How far a command has come, on stderr: one line that changes, or now and then another one.

    Where stderr is no terminal, what was shown last is repeated with the seconds that have passed,
    so that a log tells a long computation from one that hangs. A context manager, at whose end
    nothing is shown any more.

    Parameters
    ----------
    first: whether this is the rank that prints.
    begin: is shown until something else is.
    """

    def __init__(self, first: bool = True, begin: str = ""):
        self._first, self._terminal = first, first and sys.stderr.isatty()
        self._begun, self._text, self._ended = time.monotonic(), "", threading.Event()
        self(begin)

    def __call__(self, text: str) -> None:
        """Show a line in place of the one before; none for no text."""
        self._text = text
        if self._terminal:
            print(f"\r\033[K{text[:79]}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> StatusLine:
        if self._first and not self._terminal:
            threading.Thread(target=self._repeat, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self("")

    def _repeat(self) -> None:
        pause = _SOON
        while not self._ended.wait(pause):
            if self._text:
                passed = time.monotonic() - self._begun
                print(f"{self._text} ({passed:.0f} s)", file=sys.stderr, flush=True)
            pause = _SELDOM


class Progress(Generic[Row]):
    """Rows as they come: their number and the last one on stderr.

    Within `with`, an interrupt shows all rows so far, also while this rank waits in MPI.

    Parameters
    ----------
    name: describes a row in a few words.
    show: prints the rows so far, after an interrupt.
    first: whether this is the rank that prints.
    begin: is shown before there are any.
    """

    def __init__(
        self,
        name: Callable[[Row], str],
        show: Callable[[list[Row]], object],
        first: bool,
        begin: str = "",
    ):
        self.rows: list[Row] = []
        self._name, self._show, self._first = name, show, first
        self._line = StatusLine(first, begin)
        self._untold = threading.Semaphore()
        self._within = contextlib.ExitStack()

    def __call__(self, row: Row) -> None:
        """Take one more row."""
        self.rows.append(row)
        self._line(f"{len(self.rows)}: {self._name(row)}")

    def say(self, text: str) -> None:
        """Show what is done now."""
        self._line(text)

    def __enter__(self) -> Progress[Row]:
        self._within.enter_context(self._line)
        self._within.enter_context(last_words(self._tell))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._within.close()
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._tell()

    def _tell(self) -> None:
        """Show the rows so far, once."""
        if self._first and self._untold.acquire(blocking=False):
            self._show(list(self.rows))
            sys.stdout.flush()
