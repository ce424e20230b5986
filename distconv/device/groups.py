"""Process groups of torch.distributed between accelerators: made, ended, and asked for errors."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from distconv.device.kinds import backend_of
from distconv.torch_private import end_group, set_limit


def why_unavailable(kind: str) -> str | None:
    """Return why torch cannot carry messages between accelerators of a kind; None where it can."""
    distributed, backend = torch.distributed, backend_of(kind)
    if backend is None:
        return f"torch.distributed has no backend for {kind}"
    if not distributed.is_backend_available(backend):
        return f"this torch has no {backend.upper()}"
    if not hasattr(distributed, _class_of(backend)):
        return f"torch.distributed makes groups of {backend} by default groups only"
    return None


def make_group(store: Any, rank: int, size: int, device: torch.device, limit: timedelta) -> Any:
    """Return a process group between accelerators; all its ranks call it.

    Parameters
    ----------
    store: by which they find each other.
    limit: after which the group gives a message up.
    """
    backend = backend_of(device.type)
    assert backend is not None
    made: Any = getattr(torch.distributed, _class_of(backend))
    options = made.Options(is_high_priority_stream=True)
    set_limit(options, limit)
    return made(store, rank, size, options)


def error_of(group: Any) -> str | None:
    """Return what the thread of torch has met with that watches a group.

    torch before 2.7 does not tell.
    """
    error: str = group.get_error().name if hasattr(group, "get_error") else "SUCCESS"
    return None if error == "SUCCESS" else error


def close_group(group: Any, abort: bool) -> None:
    """End a group: when its work is done, or at once."""
    end_group(group, abort)


def _class_of(backend: str) -> str:
    return f"ProcessGroup{backend.upper()}"
