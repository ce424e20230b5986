"""The kind of accelerator that torch finds, and names that differ between kinds."""

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
"""Variables that choose the accelerators visible to a process."""


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device is an accelerator: neither the host, nor the meta device.

    It is called at every operator.
    """
    return device.type not in _HOSTS


def accelerator() -> str | None:
    """Return torch's name of the kind of accelerator here, such as "cuda"; None without any.

    A kind without a backend of torch.distributed is ignored.
    """
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None and backend_of(found.type) else None


@cache
def rehearsed() -> str:
    """Return the kind of accelerator that dry runs assume: the one here, else "cuda"."""
    return accelerator() or KINDS[0]


def backend_of(kind: str) -> str | None:
    """Return torch.distributed's backend for accelerators of a kind, such as "nccl", or None."""
    distributed = torch.distributed
    if not distributed.is_available():
        return {"cuda": "nccl", "xpu": "xccl"}.get(kind)
    try:
        backend: str = distributed.get_default_backend_for_device(kind)
    except ValueError:
        return None
    return None if backend == "gloo" else backend


def library_of(kind: str) -> str:
    """Return the vendor's name of the library behind a kind's backend, such as "RCCL"."""
    if kind == "cuda":
        return "RCCL" if torch.version.hip else "NCCL"
    return "oneCCL" if kind == "xpu" else backend_of(kind) or "torch.distributed"


def version_of_library(kind: str) -> str:
    """Return the version of the library behind a kind's backend, for messages.

    Of NCCL it is the version that this process has loaded, not the one that torch was built with.
    """
    if kind == "cuda":
        backend = getattr(torch.distributed, "ProcessGroupNCCL", None)
        loaded = getattr(backend, "get_runtime_nccl_version", torch.cuda.nccl.version)
        numbers: Any = loaded()
        return ".".join(map(str, numbers))
    return f"of torch {torch.__version__}"


def identities() -> tuple[str, ...]:
    """Return a text for each accelerator that this process sees.

    All processes have the same text for the same one, so ranks notice that they share it.
    """
    kind = accelerator()
    if kind is None:
        return ()
    module: Any = torch.get_device_module(kind)
    numbers = range(torch.accelerator.device_count())
    return tuple(_identity(i, module.get_device_properties(i)) for i in numbers)


def _identity(number: int, properties: Any) -> str:
    """Return the unique id of an accelerator.

    Without one, return the name of the host, the variables that hide accelerators, and `number`.
    """
    unique = getattr(properties, "uuid", None)
    if unique:
        return str(unique)
    masks = " ".join(f"{name}={os.environ[name]}" for name in _MASKS if name in os.environ)
    return f"{socket.gethostname()} {masks} {number}"


def wait_for_device(device: torch.device) -> None:
    """Let the host wait for all work queued on an accelerator."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def random_states() -> list[Tensor]:
    """Return the states of torch's random generators, on the host and on the accelerator."""
    states, kind = [torch.get_rng_state()], accelerator()
    if kind is not None:
        states.append(torch.get_device_module(kind).get_rng_state())
    return states


def set_random_states(states: list[Tensor]) -> None:
    """Set the states of torch's random generators to those that `random_states` returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.get_device_module(accelerator()).set_rng_state(states[1])


def profiler_activities() -> list[ProfilerActivity]:
    """Return the activities for torch's profiler: the host, and the accelerator if any."""
    kind = accelerator()
    here = [_ACTIVITIES[kind]] if kind in _ACTIVITIES else []
    return [ProfilerActivity.CPU, *here]


def built_for_nvidia() -> bool:
    """Return whether torch can use Nvidia's GPUs."""
    return torch.version.cuda is not None


def built_for_amd() -> bool:
    """Return whether torch can use AMD's GPUs."""
    return torch.version.hip is not None
