"""Errors about positions and class numbers out of range, which name the number and the range."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor


@contextmanager
def in_range(
    operator: str, numbers: Tensor, size: int, ignored: int | None = None
) -> Iterator[None]:
    """Add the number and the range to an error of torch about a number out of range.

    Parameters
    ----------
    numbers: the numbers on this rank, each of which should be from 0 to `size` - 1.
    ignored: a number that is allowed and stands for none.
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
