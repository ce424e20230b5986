"""Handles of started collectives, by which a program gets the results."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

_numbers = count(1)
_under_way: dict[int, Callable[[], Any]] = {}
"""By handle, the function that waits for the result and returns it."""


def give_handle(result: Callable[[], Any]) -> int:
    """Return a handle for a function that waits for a result and returns it."""
    handle = next(_numbers)
    _under_way[handle] = result
    return handle


def synchronize(handle: int) -> Any:
    """Wait for a started collective, and return its result, once for each handle.

    It returns None for a handle whose result was returned before, as in Horovod.
    """
    return _under_way.pop(handle, lambda: None)()


def poll(handle: int) -> bool:
    """Return True once `synchronize` will not wait.

    It waits for the messages itself, which are under way on all ranks.
    """
    if handle in _under_way:
        result = _under_way[handle]()
        _under_way[handle] = lambda: result
    return True
