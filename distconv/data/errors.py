"""Errors of one rank that are raised on all ranks, with the same message."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import closing
from itertools import count
from typing import Any, TypeVar
from zlib import crc32

from distconv.comm.checksums import CURE, Checked, checksum, unequal
from distconv.grid.interface import Grid
from distconv.grid.words import differences

Result = TypeVar("Result")
Item = TypeVar("Item")

_PIECE = 2**28
"""The most bytes of a message; larger contents are sent in several messages."""


class DataError(RuntimeError):
    """A file, sample or argument that cannot be used: raised on every rank, with one message."""


def together(grid: Grid, action: Callable[[], Result]) -> Result:
    """Run `action` on every rank of `grid` and return its result. Collective.

    Raises
    ------
    DataError
        On every rank, if `action` raises on any rank. The message, in one line, is that of the
        lowest rank on which it raised. On ranks where it raised, the exception is the cause.

    Examples
    --------
    >>> grid = dc.ProcessGrid(height=2)
    >>> def check():
    ...     if grid.rank == 1:
    ...         raise FileNotFoundError("part1.h5 is missing")
    >>> try:
    ...     dc.data.together(grid, check)
    ... except dc.data.DataError as error:
    ...     print(error)
    part1.h5 is missing
    """
    error: Exception | None = None
    try:
        result = action()
    except Exception as caught:
        error = caught
    complaints = grid.all_gather_object(None if error is None else _in_one_line(error))
    for complaint in complaints:
        if complaint is not None:
            raise DataError(complaint) from error
    return result


def on_rank_zero(grid: Grid, action: Callable[[], Result]) -> Result:
    """Run `action` on rank 0 alone and return its result on every rank of `grid`. Collective.

    Raises
    ------
    DataError
        On every rank, as in `together`.

    Examples
    --------
    >>> grid = dc.ProcessGrid(height=2)
    >>> dc.data.on_rank_zero(grid, lambda: np.save("x.npy", np.zeros((4, 1, 8, 8))))
    >>> len(dc.data.Dataset("x.npy", grid))  # the file is there on all ranks
    4
    """
    result = together(grid, lambda: action() if grid.rank == 0 else None)
    found: Result = grid.all_gather_object(result)[0]
    return found


def bytes_of_rank_zero(grid: Grid, content: bytes) -> bytes:
    """Return rank 0's `content` on every rank; other ranks may pass anything. Collective."""
    if grid.size == 1:
        return content
    size = grid.all_gather_object(len(content))[0]
    pieces = (
        grid.all_gather_object(content[start : start + _PIECE] if grid.rank == 0 else b"")[0]
        for start in range(0, size, _PIECE)
    )
    return b"".join(pieces)


def check_alike(grid: Grid, facts: Mapping[str, str], remedy: str) -> None:
    """Raise DataError unless all ranks of `grid` pass equal `facts`. Collective.

    Parameters
    ----------
    facts: texts by name; a name that only some ranks pass is a difference.
    remedy: the last sentence of the error message: what the user should do.

    The message, on every rank, names the values that differ and the ranks that pass each value.
    """
    complaints = differences(grid.all_gather_object(dict(facts)))
    if complaints:
        raise DataError(f"the ranks differ: {'; '.join(complaints)}. {remedy}")


def check_call(
    caller: str, grid: Grid, place: str | os.PathLike[str], arguments: Mapping[str, Any]
) -> None:
    """Raise DataError unless all ranks of `grid` call a function with equal arguments. Collective.

    Parameters
    ----------
    caller: the name of the function.
    place: the argument that is a path; ranks compare absolute paths.
    arguments: the other arguments, by name; ranks compare the values of `repr`.
    """
    known = isinstance(place, str | os.PathLike)
    facts = {"the path": os.path.abspath(place) if known else repr(place)}
    facts |= {name: repr(value) for name, value in arguments.items()}
    check_alike(grid, facts, f"Pass the same arguments to {caller} on every rank.")


def in_step(
    grid: Grid,
    items: Generator[tuple[str, Item], None, None],
    remedy: str = "All ranks must request the same mini-batches.",
    held: Callable[[Item], Sequence[Checked]] = lambda item: (),
    axes: Collection[tuple[str, ...]] = (),
) -> Generator[Item, None, None]:
    """Yield this rank's items, and check that all ranks are at the same item. Collective.

    At each step the ranks compare the names of their items, and the checksums of tensors that
    should be equal, by all-reduces of a few bytes. The iteration ends when the items of all ranks
    end.

    Parameters
    ----------
    items: yields pairs of a name and an item; the item is any value of this rank.
    remedy: the end of the error message.
    held: returns the tensors of an item to compare, of the same names on all ranks.
    axes: each distinct tuple of axes over which tensors are partitioned; the same on all ranks.

    Raises DataError on every rank, if names or tensors differ, if some ranks have items left and
    others have none, or if `items` raised on any rank.
    """
    with closing(items):
        for place in count(1):
            entry: tuple[str, Item] | None = None
            error: Exception | None = None
            try:
                entry = next(items, None)
            except Exception as caught:
                error = caught
            tensors = () if entry is None else held(entry[1])
            alike = _replicas_agree(grid, axes, tensors)
            number = crc32(repr((entry and entry[0], error is not None, alike)).encode())
            if not (grid.journal.agrees("mini-batch", number) and alike) or error is not None:
                _tell_apart(grid, place, entry and entry[0], error, remedy)
                check_replicas(grid, tensors)
            if entry is None:
                return
            yield entry[1]


def _replicas_agree(
    grid: Grid, axes: Collection[tuple[str, ...]], tensors: Sequence[Checked]
) -> bool:
    """Return whether replicas of this rank's tensors on other ranks have equal checksums.

    Collective. `axes` has each distinct tuple of grid axes over which tensors are partitioned, the
    same on all ranks. A rank without tensors compares the checksum 0.
    """
    alike = True
    for own in axes:
        replicating = [axis for axis, n in grid.shape.items() if n > 1 and axis not in own]
        if replicating:
            number = 0
            for name, tensor, cut in tensors:
                if cut == own:
                    text = f"{name} {checksum(tensor, grid.journal.debug)}"
                    number = crc32(text.encode(), number)
            comparison = grid.communicator(replicating, "mini-batches").compare([number])
            with grid.waiting():
                alike &= all(comparison.wait())
    return alike


def check_replicas(grid: Grid, tensors: Sequence[Checked]) -> None:
    """Raise DataError on every rank if replicas of one of `tensors` differ. Collective."""
    found = unequal(tensors, grid) if grid.journal.compares_on(grid.device) else None
    if found:
        raise DataError(
            f"{found[0]} is not the same on all ranks: {found[1]} in a mini-batch, but all ranks "
            "that share its samples need the same values. Pass the same files and datasets on all "
            f"ranks; if samples are changed at random, {CURE}"
        )


def _tell_apart(
    grid: Grid, place: int, name: str | None, error: Exception | None, remedy: str
) -> None:
    """Raise `DataError` on every rank if making item number `place` failed, or its names differ.

    Collective. `name` is the name of this rank's item, None if this rank has no item left; `error`
    is the exception raised while making the item, if any; `remedy` ends the error message.
    """

    def fail() -> None:
        if error is not None:
            raise error

    together(grid, fail)
    facts = {} if name is None else {f"mini-batch {place}": name}
    check_alike(grid, facts, remedy)


def _in_one_line(error: Exception) -> str:
    """Return the message of an exception in one line, for the other ranks.

    The line begins with the type of the exception, except for OSError, ValueError and DataError
    with a message.
    """
    text = " ".join(str(error).split())
    plain = isinstance(error, OSError | ValueError | DataError) and text
    return text if plain else f"{type(error).__name__}: {text}"
