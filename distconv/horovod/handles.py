"""Handles of what has been started, by which a program asks for the result."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

_numbers = count(1)
_under_way: dict[int, Callable[[], Any]] = {}
"""What waits for a result and returns it, by the handle."""


def give_handle(result: Callable[[], Any]) -> int:
    """Return a handle of a function that waits for a result and returns it."""
    handle = next(_numbers)
    _under_way[handle] = result
    return handle


def synchronize(handle: int) -> Any:
    """Wait for what has been started, and return its result; once for each handle."""
    if handle not in _under_way:
        raise ValueError(
            f"distconv.horovod.synchronize: {handle!r} is no handle that has a result to come; "
            "pass what a function like allreduce_async has returned, once"
        )
    return _under_way.pop(handle)()


def poll(handle: int) -> bool:
    """Return True when `synchronize` will not wait.

    It waits for the messages itself, which are under way on all ranks.
    """
    if handle in _under_way:
        result = _under_way[handle]()
        _under_way[handle] = lambda: result
    return True
