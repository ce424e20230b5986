"""Pools of memory for messages, which later messages of the same size use again.

Fresh memory costs page faults when it is first written, up to several times the cost of the
message.
"""

from __future__ import annotations

from collections import defaultdict
from math import prod
from weakref import WeakSet, ref

import numpy as np
import torch
from torch import Tensor

ByteArray = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

KEPT_BYTES = 64 * 2**20
"""Bytes kept for later messages."""
SMALL_BYTES = 64 * 2**10
"""The largest message, in bytes, whose memory malloc reuses itself, which is cheaper."""


def release_idle() -> None:
    """Free the memory that all pools of this process keep for later messages."""
    for pool in list(_POOLS):
        pool.release_idle()


class BufferPool:
    """Memory for messages on the CPU: it returns to the pool when its tensor is no longer used."""

    def __init__(self) -> None:
        _POOLS.add(self)
        self._idle: defaultdict[int, list[ByteArray]] = defaultdict(list)
        self._idle_bytes = 0
        self._lent: dict[int, tuple[ref[ByteArray], ByteArray]] = {}

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return an uninitialised, contiguous CPU tensor of `shape`, of the type of `like`."""
        size = prod(shape) * like.element_size()
        if size <= SMALL_BYTES:
            return like.new_empty(shape)
        stack = self._idle.get(size)
        if stack:
            memory = stack.pop()
            self._idle_bytes -= size
            if not stack:
                del self._idle[size]
        else:
            memory = torch.empty(size, dtype=torch.uint8, device="cpu").numpy()
        # The tensor and all that share its memory keep this view alive.
        view = memory[:]
        use = ref(view, self._take_back)
        self._lent[id(use)] = use, memory
        message = torch.frombuffer(view, dtype=like.dtype)
        return message if len(shape) == 1 else message.view(shape)

    def release_idle(self) -> None:
        """Free the memory that this pool keeps for later messages."""
        self._idle.clear()
        self._idle_bytes = 0

    def _take_back(self, use: ref[ByteArray]) -> None:
        _, memory = self._lent.pop(id(use))
        if self._idle_bytes + memory.nbytes > KEPT_BYTES:
            self.release_idle()
        if memory.nbytes <= KEPT_BYTES:
            self._idle[memory.nbytes].append(memory)
            self._idle_bytes += memory.nbytes


_POOLS: WeakSet[BufferPool] = WeakSet()
"""All pools of the process."""
