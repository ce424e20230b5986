"""The kind of accelerator that torch finds, and what has another name for each kind."""

from __future__ import annotations

import os
import socket
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

KINDS = ("cuda", "xpu")
"""The kinds that a program may ask for where there is none: GPUs of Nvidia and AMD, and Intel's."""

_HOSTS = ("cpu", "meta")

_ACTIVITIES = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}

_MASKS = (
    *("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    "ZE_AFFINITY_MASK",
)
"""Variables that choose the accelerators which a process sees."""


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device computes beside the host: neither the host, nor one without memory.

    It is asked for at every operator.
    """
    return device.type not in _HOSTS


def accelerator() -> str | None:
    """Return the kind of accelerator that this process sees; None without any.

    One for which torch has no backend that carries messages between streams does not count.
    """
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None and backend_of(found.type) else None


@cache
def rehearsed() -> str:
    """Return the kind of accelerator that dry runs play: the one here, or the most common."""
    return accelerator() or KINDS[0]


def backend_of(kind: str) -> str | None:
    """Return the backend of torch.distributed between accelerators of a kind; None without one."""
    distributed = torch.distributed
    if not distributed.is_available():
        return {"cuda": "nccl", "xpu": "xccl"}.get(kind)
    try:
        backend: str = distributed.get_default_backend_for_device(kind)
    except ValueError:
        return None
    return None if backend == "gloo" else backend


def library_of(kind: str) -> str:
    """Return what vendors call the library behind the backend of a kind."""
    if kind == "cuda":
        return "RCCL" if torch.version.hip else "NCCL"
    return "oneCCL" if kind == "xpu" else backend_of(kind) or "torch.distributed"


def version_of_library(kind: str) -> str:
    """Return the version of the library behind the backend of a kind, as far as torch tells."""
    if kind == "cuda":
        numbers: Any = torch.cuda.nccl.version()
        return ".".join(map(str, numbers))
    return f"of torch {torch.__version__}"


def identities() -> tuple[str, ...]:
    """Return the accelerators that this process sees, by names that all processes give them."""
    kind = accelerator()
    if kind is None:
        return ()
    module: Any = torch.get_device_module(kind)
    numbers = range(torch.accelerator.device_count())
    return tuple(_identity(i, module.get_device_properties(i)) for i in numbers)


def _identity(number: int, properties: Any) -> str:
    """Return the identity of an accelerator; without one, its number among those seen here."""
    unique = getattr(properties, "uuid", None)
    if unique:
        return str(unique)
    masks = " ".join(f"{name}={os.environ[name]}" for name in _MASKS if name in os.environ)
    return f"{socket.gethostname()} {masks} {number}"


def synchronize(device: torch.device) -> None:
    """Let the host wait for all that an accelerator has been given to do."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def random_states() -> list[Tensor]:
    """Return the states of torch's generators: the host's, and the current accelerator's."""
    states, kind = [torch.get_rng_state()], accelerator()
    if kind is not None:
        states.append(torch.get_device_module(kind).get_rng_state())
    return states


def profiler_activities() -> list[ProfilerActivity]:
    """Return what torch's profiler can record here: the host, and the accelerator."""
    kind = accelerator()
    here = [_ACTIVITIES[kind]] if kind in _ACTIVITIES else []
    return [ProfilerActivity.CPU, *here]


def built_for_nvidia() -> bool:
    """Return whether torch can use Nvidia's GPUs."""
    return torch.version.cuda is not None


def built_for_amd() -> bool:
    """Return whether torch can use AMD's GPUs."""
    return torch.version.hip is not None
