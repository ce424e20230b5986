"""Constant tensors, made once for each device and reused.

A new one would be copied from the host; a copy to a GPU waits for all work queued on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch

from distconv.device.kinds import is_accelerator

Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")

LIMIT = 256
"""The number of results of each function kept on CPUs; the least recently used goes first."""


def remembered(
    make: Callable[Concatenate[torch.device, Arguments], Made],
) -> Callable[Concatenate[torch.device, Arguments], Made]:
    """Cache the tensors that a function makes of its arguments; nobody may write to them.

    The last `LIMIT` are kept on CPUs. On GPUs all are kept for good: a captured graph reads them in
    place.
    """
    last, every = lru_cache(maxsize=LIMIT)(make), cache(make)

    @wraps(make)
    def look_up(device: torch.device, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Made:
        kept = every if is_accelerator(device) else last
        return kept(device, *args, **kwargs)  # type: ignore[arg-type]

    return look_up
