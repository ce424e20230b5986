"""Closing the carriers between accelerators at the end of the program, which takes limited time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial

from distconv.device.graphs import release_graphs
from distconv.transport.interface import StreamTransport

_PATIENCE = 10.0
"""Seconds allowed for closing, and again for aborting. The programs of all ranks have ended by
then, so no result is lost with a message that is still under way."""


class Closing:
    """Closes the carriers that `carriers()` returns, when the program ends.

    Its threads start now, as Python 3.12 and later start none at the end of a program.
    """

    def __init__(self, carriers: Callable[[], Iterable[StreamTransport]]):
        self._carriers = carriers
        self._close, self._abort = (_Ready(partial(self._end, abort)) for abort in (False, True))

    def run(self, abort: bool) -> None:
        """Close the carriers: at once for `abort`, else when their work is done.

        All graphs of the device are emptied before. Carriers that are not closed within a limit are
        aborted.
        """
        release_graphs()
        if not abort and self._close.ends_within(_PATIENCE):
            return
        if not abort:
            print(
                f"distconv: connections between accelerators did not close within {_PATIENCE:g} s, "
                "and are aborted",
                file=sys.stderr,
                flush=True,
            )
        self._abort.ends_within(_PATIENCE)

    def _end(self, abort: bool) -> None:
        for carrier in self._carriers():
            carrier.close(abort)


class _Ready:
    """A daemon thread that waits to do its work."""

    def __init__(self, work: Callable[[], None]):
        self._work, self._begun = work, threading.Event()
        self._thread = threading.Thread(target=self._run, name="distconv-close", daemon=True)
        self._thread.start()

    def ends_within(self, seconds: float) -> bool:
        """Let the thread begin, and return whether its work is done within `seconds`."""
        self._begun.set()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._begun.wait()
        self._work()
