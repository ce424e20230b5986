"""How far a command has come: a line on the terminal."""

from __future__ import annotations

import sys
import threading
import time

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
