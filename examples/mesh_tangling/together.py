"""Failing together: what goes wrong on one rank is raised on all of them, in the same words."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from functools import partial
from itertools import count
from typing import TypeVar

from distconv.grid.order import ranks_in_words
from distconv.transport.communicator import ObjectCommunicator

Result = TypeVar("Result")
Item = TypeVar("Item")


class InvalidInput(Exception):
    """A file or an argument that cannot be used. Raised on every rank with the same message."""


def together(comm: ObjectCommunicator, action: Callable[[], Result]) -> Result:
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


def rank_zero(comm: ObjectCommunicator, action: Callable[[], Result]) -> Result:
    """Run `action` on rank 0 alone and give its result to every rank of `comm`. Collective.

    Raises:
        InvalidInput: on every rank, as in `together`.
    """
    result = together(comm, lambda: action() if comm.rank == 0 else None)
    return comm.bcast(result)


def check_alike(comm: ObjectCommunicator, facts: Mapping[str, str], remedy: str) -> None:
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


def in_step(
    comm: ObjectCommunicator, items: Generator[tuple[str, Item], None, None]
) -> Iterator[Item]:
    """Yield the items of this rank while every rank of `comm` has one of the same name. Collective.

    Its name travels for each item; it ends when the items of all ranks do.

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
            name = entry[0] if entry else None
            everyone = comm.allgather((complaint is not None, name))
            if any(failed for failed, _ in everyone):
                together(comm, partial(_raise, complaint))
            if len(set(everyone)) > 1:
                facts = {} if name is None else {f"mini-batch {place}": name}
                check_alike(comm, facts, "All ranks have to ask for the same mini-batches.")
            if entry is None:
                return
            yield entry[1]


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
