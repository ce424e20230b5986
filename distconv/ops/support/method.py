"""The choice between the two ways to compute a convolution, or to pool, on a cut plane."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import getclosurevars, unwrap
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.utils.checkpoint

METHODS = ("assembled", "overlapped")
_FORCED: ContextVar[str | None] = ContextVar("distconv_method", default=None)
_CHECKPOINTED: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""The choices in force in calls whose activations torch.utils.checkpoint computes again."""


@contextmanager
def method(name: str) -> Iterator[None]:
    """Compute convolutions and pooling in the context by one method, where both apply; to debug.

    "assembled" copies a rank's block and its halos into one buffer and computes on that.
    "overlapped" computes on the block as it is while the halos travel, and mends the boundary.
    Results are equal to rounding. Without a choice the faster is taken. All ranks have to choose
    the same. Activations that torch.utils.checkpoint computes again, without reentry, are computed
    by the same method. Another name raises `ValueError`.
    """
    if name not in METHODS:
        raise ValueError(f"method={name!r} is not known; choose from {', '.join(METHODS)}")
    token = _FORCED.set(name)
    try:
        yield
    finally:
        _FORCED.reset(token)


def chosen_method() -> str | None:
    """Return the method that has been chosen, if any."""
    name = _FORCED.get()
    if name is None and not _CHECKPOINTED:
        return None
    call = _checkpointed_call()
    if call is None:
        return name
    if torch._C._current_graph_task_id() == -1:
        if name is not None:
            _CHECKPOINTED[call] = name
        return name
    return _CHECKPOINTED.get(call)


def _checkpointed_call() -> Any:
    """Return what torch.utils.checkpoint keeps of the call under way; None outside of such calls.

    It is the same object when the call is made for the first time and when it is computed again. It
    is found in the hooks through which torch has all saved tensors go.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = top and top(True)
    if not hooks or getattr(hooks[0], "__module__", None) != torch.utils.checkpoint.__name__:
        return None
    held = getclosurevars(unwrap(hooks[0])).nonlocals
    again = held.get("target_frame_ref")
    return held.get("frame") if again is None else again()
