"""Errors that name the position or class number that is out of range."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor


@contextmanager
def in_range(
    operator: str, numbers: Tensor, size: int, ignored: int | None = None
) -> Iterator[None]:
    """Let errors of torch in this context name the number that is out of range, and the range.

    Parameters
    ----------
    operator: the called function, for the error.
    numbers: the numbers on this rank, each of which should be from 0 to `size` - 1.
    ignored: a number outside the range that is allowed.
    """
    try:
        yield
    except (IndexError, RuntimeError) as error:
        wrong = (numbers < 0) | (numbers >= size)
        if ignored is not None:
            wrong &= numbers != ignored
        if not wrong.any():
            raise
        raise type(error)(
            f"{operator}: {numbers[wrong][0].item()} is out of range; expected numbers from 0 to "
            f"{size - 1}, of {size}"
        ) from None
