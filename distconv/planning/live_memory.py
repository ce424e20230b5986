"""`LiveMemory`: the bytes that a rank of a dry run holds, followed from tensor to tensor."""

from __future__ import annotations

import weakref
from collections import Counter
from functools import partial
from typing import Any

from torch import Tensor

from distconv.torch_private import address_of_memory
from distconv.transport.buffers import KEPT_BYTES, SMALL_BYTES


class LiveMemory:
    """The bytes of all live tensors of a dry run, by kind, now and at their highest total.

    With `pools`, the memory of a message is kept for later messages of its size, as on CPUs.
    """

    def __init__(self, pools: bool = True) -> None:
        self._pools = pools
        self._live: dict[int, tuple[int, str, weakref.ref[Any], str]] = {}
        self._kept: set[int] = set()
        self._bytes: Counter[str] = Counter()
        self.total = self._most = 0
        self.at_most: dict[str, int] = {}
        self._idle: Counter[int] = Counter()
        self._idle_bytes = 0

    def hold(self, tensors: Any, kind: str, layer: str = "") -> None:
        """Count tensors, which `layer` makes, as memory of this kind, unless counted already."""
        for x in tensors:
            storage, key = x.untyped_storage(), address_of_memory(x)
            if key in self._live or not storage.nbytes():
                continue
            size = storage.nbytes()
            # The object of the storage lives as long as its memory.
            reference = weakref.ref(storage, partial(self._release, key))
            self._live[key] = size, kind, reference, layer
            if kind == "halos" and self._idle[size]:
                self._idle[size] -= 1
                self._idle_bytes -= size
                continue
            self._bytes[kind] += size
            self.total += size
            if self.total > self._most:
                self._most, self.at_most = self.total, dict(self._bytes)

    def turn_into(self, tensor: Tensor, kind: str) -> None:
        """Move the bytes of a live tensor to another kind."""
        key = address_of_memory(tensor)
        if key in self._live:
            size, before, reference, layer = self._live[key]
            self._live[key] = size, kind, reference, layer
            self._bytes[before] -= size
            self._bytes[kind] += size

    def keep(self, x: Tensor) -> int:
        """Mark a tensor as kept for the backward pass, and return its bytes.

        Returns 0 for a parameter, and for a tensor that is marked already.
        """
        self.hold([x], "other")
        key = address_of_memory(x)
        size, kind, _, _ = self._live.get(key, (0, "", None, ""))
        if key in self._kept or kind == "parameters":
            return 0
        self._kept.add(key)
        return size

    def turn(self) -> None:
        """End the forward pass: live results of layers become activations."""
        for key, (size, kind, reference, layer) in self._live.items():
            if kind == "other" and layer:
                self._live[key] = size, "activations", reference, layer
                self._bytes["other"] -= size
                self._bytes["activations"] += size

    def _release(self, key: int, _: object) -> None:
        size, kind, _, _ = self._live.pop(key)
        self._kept.discard(key)
        if self._pools and kind == "halos" and SMALL_BYTES < size <= KEPT_BYTES:
            if self._idle_bytes + size > KEPT_BYTES:
                self._bytes[kind] -= self._idle_bytes
                self.total -= self._idle_bytes
                self._idle.clear()
                self._idle_bytes = 0
            self._idle[size] += 1
            self._idle_bytes += size
            return
        self._bytes[kind] -= size
        self.total -= size
