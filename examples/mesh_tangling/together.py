"""Failing together: what goes wrong on one rank is raised on all of them, in the same words."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from functools import partial
from itertools import count
from typing import TypeVar
from zlib import crc32

import numpy as np
from mpi4py import MPI

from distconv.grid.order import ranks_in_words

Result = TypeVar("Result")
Item = TypeVar("Item")


class InvalidInput(Exception):
    """A file or an argument that cannot be used. Raised on every rank with the same message."""


def together(comm: MPI.Comm, action: Callable[[], Result]) -> Result:
    """Run `action` on every rank of `comm` and return its result. Collective.

    Raises:
        InvalidInput: on every rank, with the message of the lowest rank on which `action`
            raised `OSError` or `ValueError`, in one line. Any other exception passes through
            where it arose.
    """
    try:
        result, complaint = action(), None
    except (OSError, ValueError) as error:
        complaint = " ".join(str(error).split())
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


def check_alike(comm: MPI.Comm, facts: Mapping[str, str], remedy: str) -> None:
    """Compare what every rank of `comm` has found out under the same names. Collective.

    Args:
        facts: texts by name; a rank may lack some that others have.
        remedy: what to do where they differ.

    Raises:
        InvalidInput: on every rank, with the values that differ and the ranks that have them.
    """
    everywhere = comm.allgather(dict(facts))
    complaints = []
    for name in dict.fromkeys(name for facts in everywhere for name in facts):
        ranks: dict[str | None, list[int]] = {}
        for rank, there in enumerate(everywhere):
            ranks.setdefault(there.get(name), []).append(rank)
        if len(ranks) > 1:
            values = (f"{v or 'missing'} on {ranks_in_words(those)}" for v, those in ranks.items())
            complaints.append(f"{name} is {' and '.join(values)}")
    if complaints:
        raise InvalidInput(f"the ranks differ: {'; '.join(complaints)}. {remedy}")


def in_step(comm: MPI.Comm, items: Generator[tuple[str, Item], None, None]) -> Iterator[Item]:
    """Yield the items of this rank while every rank of `comm` has one of the same name. Collective.

    One reduction of three numbers an item; it ends when the items of all ranks do.

    Raises:
        InvalidInput: on every rank, where the names differ, or some ranks have items left and
            others have none, or where making an item raised `OSError` or `ValueError` on any.
    """
    with closing(items):
        for place in count(1):
            entry = complaint = None
            try:
                entry = next(items, None)
            except (OSError, ValueError) as error:
                complaint = error
            code = crc32(entry[0].encode()) + 1 if entry else 0
            failed, largest, smallest = _largest(comm, [complaint is not None, code, -code])
            if failed:
                together(comm, partial(_raise, complaint))
            if largest != -smallest:
                facts = {f"mini-batch {place}": entry[0]} if entry else {}
                check_alike(comm, facts, "All ranks have to ask for the same mini-batches.")
            if entry is None:
                return
            yield entry[1]


def _largest(comm: MPI.Comm, numbers: list[int]) -> list[int]:
    """Return the largest of each number over all ranks."""
    largest = np.array(numbers, np.int64)
    comm.Allreduce(MPI.IN_PLACE, largest, MPI.MAX)
    return largest.tolist()


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
