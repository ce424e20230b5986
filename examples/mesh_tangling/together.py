"""Failing together: what goes wrong on one rank is raised on all of them, in the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mpi4py import MPI

Result = TypeVar("Result")


class InvalidInput(Exception):
    """A file or an argument that cannot be used. Raised on every rank with the same message."""


def together(comm: MPI.Comm, action: Callable[[], Result]) -> Result:
    """Run `action` on every rank of `comm` and return its result. Collective.

    Raises:
        InvalidInput: on every rank, with the message of the lowest rank on which `action`
            raised `OSError` or `ValueError`. Any other exception passes through where it
            arose.
    """
    try:
        result, complaint = action(), None
    except (OSError, ValueError) as error:
        complaint = str(error)
    complaints = [text for text in comm.allgather(complaint) if text is not None]
    if complaints:
        raise InvalidInput(complaints[0])
    return result


def rank_zero(comm: MPI.Comm, action: Callable[[], Result]) -> Result:
    """Run `action` on rank 0 alone and give its result to every rank of `comm`. Collective.

    Raises:
        InvalidInput: on every rank, as in `together`.
    """
    result = together(comm, lambda: action() if comm.rank == 0 else None)
    return comm.bcast(result)
