"""A rank that raises ends the whole job, instead of leaving the others waiting for its messages."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import TracebackType

from mpi4py import MPI

_GRACE = 1.5
"""Seconds that another rank waits for rank 0 to report, so that an error all ranks share is
printed once."""

_FORWARDING = 0.5
"""Seconds that the launcher is given to forward the report, which an abort may cut off."""


def abort_when_a_rank_raises() -> None:
    """Make an uncaught exception print its traceback and abort all ranks of MPI.COMM_WORLD.

    Errors raised on all ranks together are reported by the first rank to come out of its grace
    period, which is rank 0 where it is among them. Does nothing on a single rank. `sys.exit` is no
    uncaught exception to Python, and so does not end the other ranks.
    """
    if MPI.COMM_WORLD.size == 1 or isinstance(sys.excepthook, _Abort):
        return
    sys.excepthook = _Abort(sys.excepthook)


class _Abort:
    def __init__(self, report: object):
        self._report = report

    def __call__(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        rank = MPI.COMM_WORLD.rank
        if rank:
            time.sleep(_GRACE + min(0.1 * rank, 2.0))
        try:
            sys.stdout.flush()
            print(f"distconv: rank {rank} of {MPI.COMM_WORLD.size} raised", file=sys.stderr)
            self._report(kind, error, traceback)  # type: ignore[operator]
        finally:
            abort_job()


def abort_job() -> None:
    """End all processes of the job, after what has been printed is on its way."""
    sys.stderr.flush()
    time.sleep(_FORWARDING)
    # MPI may be busy with a wait of another thread; the launcher ends the others all the same.
    killer = threading.Timer(_FORWARDING * 10, os.kill, (os.getpid(), signal.SIGKILL))
    killer.daemon = True
    killer.start()
    MPI.COMM_WORLD.Abort(1)
