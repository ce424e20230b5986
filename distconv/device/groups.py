"""Process groups of torch.distributed between accelerators: how to make one, and its errors."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import torch

from distconv.device.kinds import backend_of, library_of
from distconv.torch_private import set_limit


def why_no_backend(kind: str) -> str | None:
    """Return why torch cannot carry messages between accelerators of this kind; None if it can."""
    distributed, backend = torch.distributed, backend_of(kind)
    if backend is None:
        return f"torch.distributed has no backend for {kind}"
    if not distributed.is_backend_available(backend):
        return f"this torch has no {backend.upper()}"
    if not hasattr(distributed, _class_of(backend)):
        return f"torch.distributed makes groups of {backend} by default groups only"
    return None


def warn_where_errors_stay_unknown(kind: str) -> None:
    """Warn if this torch reports no errors of process groups between accelerators.

    Python shows the warning once.
    """
    backend = backend_of(kind)
    made = getattr(torch.distributed, _class_of(backend or ""), None)
    if made is not None and not hasattr(made, "get_error"):
        warnings.warn(
            f"ProcessGrid: the groups of {library_of(kind)} of torch {torch.__version__} do not "
            "tell of errors before torch itself ends the job, later and in fewer words; torch 2.7 "
            "or newer does for NCCL",
            stacklevel=2,
        )


def make_group(store: Any, rank: int, size: int, device: torch.device, limit: timedelta) -> Any:
    """Return a process group between accelerators, for `size` ranks, which all call it.

    These ranks find each other over `store`. A message that takes longer than `limit` is an error.
    """
    backend = backend_of(device.type)
    assert backend is not None
    made: Any = getattr(torch.distributed, _class_of(backend))
    options = made.Options(is_high_priority_stream=True)
    set_limit(options, limit)
    return made(store, rank, size, options)


def error_of(group: Any) -> str | None:
    """Return the error that a thread of torch has found in a process group, or None."""
    error: str = group.get_error().name if hasattr(group, "get_error") else "SUCCESS"
    return None if error == "SUCCESS" else error


def _class_of(backend: str) -> str:
    return f"ProcessGroup{backend.upper()}"
