"""A rank that raises ends the whole job, instead of leaving the others waiting for its messages."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import Any

from distconv.launch import is_copy

_GRACE = 1.5
"""Seconds that another rank waits for rank 0 to report, so that an error all ranks share is
printed once."""

_FORWARDING = 0.5
"""Seconds that the launcher is given to forward the report, which an abort may cut off."""


def abort_when_a_rank_raises() -> None:
    """Make an uncaught exception print its traceback and abort all ranks of MPI.COMM_WORLD.

    Errors raised on all ranks together are reported by the first rank to come out of its grace
    period, which is rank 0 where it is among them. Changes nothing on a single rank, before MPI has
    started, and in processes that ranks have started. `sys.exit` is no uncaught exception to
    Python, and so does not end the other ranks.
    """
    if not isinstance(sys.excepthook, _Abort):
        sys.excepthook = _Abort(sys.excepthook)


class _Abort:
    def __init__(self, report: object):
        self._report = report

    def __call__(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        world = _world_of_several()
        if world is None:
            self._report(kind, error, traceback)  # type: ignore[operator]
            if is_copy():
                sys.stderr.flush()
                os._exit(1)  # or Python would end MPI, which waits for other ranks
            return
        rank = world.rank
        if rank:
            time.sleep(_GRACE + min(0.1 * rank, 2.0))
        try:
            sys.stdout.flush()
            print(f"distconv: rank {rank} of {world.size} raised", file=sys.stderr)
            self._report(kind, error, traceback)  # type: ignore[operator]
            sys.stderr.flush()
            time.sleep(_FORWARDING)
        finally:
            world.Abort(1)


def _world_of_several() -> Any:
    """Return MPI.COMM_WORLD where this process is one of several ranks of it, else None."""
    MPI: Any = sys.modules.get("mpi4py.MPI")
    if MPI is None or is_copy() or not MPI.Is_initialized() or MPI.Is_finalized():
        return None
    return MPI.COMM_WORLD if MPI.COMM_WORLD.size > 1 else None
