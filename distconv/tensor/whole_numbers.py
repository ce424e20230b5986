"""Integers as torch accepts them: Python's, numpy's, and tensors of one integer."""

from __future__ import annotations

from operator import index
from typing import Any

_INTEGERS = frozenset({int})


def whole_number(value: Any, what: str) -> int:
    """Return `value` as an int.

    Raises TypeError, which names `what`, for a value that is no integer, also for the float 2.0.
    """
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{what}={value!r} is not a whole number") from None


def whole_numbers(value: Any, what: str) -> tuple[int, ...]:
    """Return one integer, or several, as a tuple of ints.

    Raises TypeError, which names `what`, for other values.
    """
    if type(value) is tuple and _INTEGERS.issuperset(map(type, value)):
        return value
    if isinstance(value, int):
        return (value,)
    members = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(whole_number(member, what) for member in members)
