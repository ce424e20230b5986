"""One verdict on all ranks: a rank that fails raises when all know, so that no other waits for it.

The ranks of a test would else part: one leaves the test, and the others wait in its next message.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis.errors import HypothesisException
from mpi4py import MPI

_VERDICTS = MPI.COMM_WORLD.Dup()
_PATIENCE = 90.0
"""Seconds that a rank waits for the verdicts of the others."""
_PAUSE = 2e-4
"""Seconds until it looks again, in which the core serves them."""


def raise_together(wrong: Sequence[str]) -> None:
    """Raise AssertionError on all ranks if any rank has found something wrong. Collective.

    The ranks first complete all communication of the test, and only then call this function.
    """
    report = first_report(wrong[0] if wrong else None)
    if report is not None:
        raise AssertionError(report)


@contextmanager
def one_verdict() -> Iterator[None]:
    """Raise AssertionError on all ranks if the block raises on any, with the report of the first.

    Collective. Where ranks communicate in the block, what raises in it must raise on all of them.
    """
    report = None
    try:
        yield
    except HypothesisException:  # rejects the example, on every rank
        raise
    except (Exception, pytest.fail.Exception):
        report = traceback.format_exc()
    raise_together([] if report is None else [report])


def first_report(mine: str | None) -> str | None:
    """Return the report of the first rank that has one, on every rank; all call it.

    Where a rank does not come, because it waits for a message of one that has raised, the job ends.
    """
    failed = np.empty(_VERDICTS.size, dtype=bool)
    request = _VERDICTS.Iallgather(np.array([mine is not None]), failed)
    until = time.monotonic() + _PATIENCE
    while not request.Test():
        if time.monotonic() > until:
            sys.__stderr__.write(f"rank {_VERDICTS.rank} waits for others in vain:\n{mine}\n")
            sys.__stderr__.flush()
            MPI.COMM_WORLD.Abort(1)
        time.sleep(_PAUSE)
    if not failed.any():
        return None
    first = int(failed.argmax())
    report = _VERDICTS.bcast(mine, first)
    return f"on ranks {failed.nonzero()[0].tolist()}: {report}"
