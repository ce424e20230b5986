"""`StatusLine`: the progress of a command, on one line of the terminal."""

from __future__ import annotations

import sys
import threading
import time

_SOON, _SELDOM = 2.0, 10.0
"""Seconds until the first line, and between lines, where stderr is no terminal."""


class StatusLine:
    """A command's progress on stderr of the first rank, in a `with` block: one line that changes.

    If stderr is no terminal, the text is printed every 10 seconds with the seconds passed, so that
    in a log a long computation differs from one that hangs.
    """

    def __init__(self, first: bool = True, begin: str = ""):
        self._first, self._terminal = first, first and sys.stderr.isatty()
        self._begun, self._text, self._ended = time.monotonic(), "", threading.Event()
        self(begin)

    def __call__(self, text: str) -> None:
        """Set the text of the line, in place of the last one; "" to clear the line."""
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
