"""`Packing`: tensors of known shapes and types in one message of bytes; some may be missing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes to which each tensor in a message is aligned, so that it can be used in place."""


class Packing:
    """Packs tensors into one message of bytes, some of which may be missing, and unpacks them.

    `tensors` are examples of the shapes and types, in order; each message has a tensor, or None,
    for each of them.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        self._kinds = [(t.shape, t.dtype, t.numel() * t.element_size()) for t in tensors]
        self._begin = _aligned(len(tensors))

    def pack(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return a message: the bytes of the tensors, copied to host memory from any device."""
        size = self._begin
        for (_, _, nbytes), tensor in zip(self._kinds, tensors, strict=True):
            size += _aligned(nbytes) if tensor is not None else 0
        message = torch.zeros(size, dtype=torch.uint8)
        place = self._begin
        for i, tensor in enumerate(tensors):
            if tensor is None:
                continue
            shape, dtype, nbytes = self._kinds[i]
            message[i] = 1
            message[place : place + nbytes].view(dtype).view(shape).copy_(tensor.detach())
            place += _aligned(nbytes)
        return message

    def unpack(self, message: Tensor) -> list[Tensor | None]:
        """Return views of the tensors in a message; raise ValueError if its size is wrong."""
        there = message[: len(self._kinds)].tolist()
        tensors: list[Tensor | None] = []
        place = self._begin
        for present, (shape, dtype, nbytes) in zip(there, self._kinds, strict=True):
            if not present:
                tensors.append(None)
                continue
            if place + nbytes > len(message):
                break
            tensors.append(message[place : place + nbytes].view(dtype).view(shape))
            place += _aligned(nbytes)
        if place != len(message) or len(tensors) != len(self._kinds):
            raise ValueError(f"a message of {len(message)} bytes is none of {len(there)} tensors")
        return tensors


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def dealt_out(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Divide items among parts of about equal sizes; return the indices of each part's items.

    Each item, the largest first, goes to the smallest part so far, the first of equals.
    """
    totals = [(0, part) for part in range(parts)]
    items: list[list[int]] = [[] for _ in range(parts)]
    for place in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        total, part = min(totals)
        items[part].append(place)
        totals[part] = total + sizes[place], part
    return [sorted(part) for part in items]
