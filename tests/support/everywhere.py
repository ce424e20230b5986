"""Actions on one rank of a test, and checks of their results on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
from mpi4py import MPI

from distconv.data import DataError

WORLD = MPI.COMM_WORLD
T = TypeVar("T")


def on_rank_zero(action: Callable[[], object]) -> None:
    """Run `action` on rank 0, and let the others wait for it."""
    if WORLD.rank == 0:
        action()
    WORLD.barrier()


def from_rank_zero(make: Callable[[], T]) -> T:
    """Return on all ranks what `make` returns on rank 0, so that only one of them computes it."""
    made: T = WORLD.bcast(make() if WORLD.rank == 0 else None)
    return made


def fails_everywhere(action: Callable[[], object], message: str) -> None:
    """Assert that `action` raises DataError on every rank, with one message that matches."""
    with pytest.raises(DataError, match=message) as caught:
        action()
    told = str(caught.value)
    # Its frames hold it, and a DataLoader whose workers the garbage collector would wait for.
    del caught
    assert len(set(WORLD.allgather(told))) == 1


def ended_with_one_line(
    program: Callable[[], object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Assert that a program ends on every rank with status 2, and tells why on rank 0 alone."""
    with pytest.raises(SystemExit) as caught:
        program()
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert message in said if WORLD.rank == 0 else not said
