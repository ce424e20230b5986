"""NCCL by cupy: its bindings, and the addresses of streams."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


def bindings() -> Any:
    """Return cupy's module for NCCL; raises ImportError without cupy."""
    from cupy.cuda import nccl

    return nccl


def why_no_cupy(kind: str) -> str | None:
    """Return why cupy's NCCL cannot be used with accelerators of this kind; None if it can."""
    if kind != "cuda":
        return f"cupy has no library of messages between devices of kind {kind}"
    try:
        nccl = bindings()
    except ImportError as error:
        return f"cupy is missing ({error}); install cupy-cuda13x, or -cuda12x for CUDA 12"
    return None if nccl.available else "cupy finds no NCCL; install nvidia-nccl-cu13, or -cu12"


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which `device` is CUDA's current device, also for cupy."""
    return torch.cuda.device(device)


def address_of(stream: torch.Stream) -> int:
    """Return the address of a stream, by which cupy knows it."""
    address: int | None = getattr(stream, "native_handle", None)
    if address is None:  # older versions of torch
        ids: Any = {n: getattr(stream, n) for n in ("stream_id", "device_index", "device_type")}
        address = torch.cuda.Stream(**ids).cuda_stream
    return address
