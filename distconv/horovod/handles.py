"""Handles, numbers by which a program gets the results of collectives that it has started."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

_numbers = count(1)
_under_way: dict[int, Callable[[], Any]] = {}
"""By handle, the function that waits for the result and returns it."""


def give_handle(result: Callable[[], Any]) -> int:
    """Return a new handle; `synchronize` will call `result`, which waits for a collective."""
    handle = next(_numbers)
    _under_way[handle] = result
    return handle


class CallableHandle(int):
    """A handle that can be called to wait for the result, as `synchronize` does."""

    def __call__(self) -> Any:
        """Wait for the collective, and return its result, once."""
        return synchronize(self)


def synchronize(handle: int) -> Any:
    """Wait for a started collective, and return its result, once for each handle.

    Later calls with the same handle return None, as in Horovod.
    """
    return _under_way.pop(handle, lambda: None)()


def poll(handle: int) -> bool:
    """Wait for a started collective and return True: `synchronize` will not wait any more.

    Horovod's returns False while messages are under way; here it waits for them instead.
    """
    if handle in _under_way:
        result = _under_way[handle]()
        _under_way[handle] = lambda: result
    return True
