"""Memory whose slices are objects, by which it is known whether anybody still uses them.

A tensor made of a slice keeps it alive, as does every view of that tensor. numpy's arrays are such
slices of the memory of a CPU.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class DeviceMemory:
    """Bytes of a GPU, which are sliced as numpy's arrays are."""

    def __init__(self, tensor: Tensor):
        self._tensor = tensor
        self.device = tensor.device
        self.__cuda_array_interface__: dict[str, Any] = tensor.__cuda_array_interface__

    def __getitem__(self, part: slice) -> DeviceMemory:
        return DeviceMemory(self._tensor[part])


Memory: TypeAlias = NDArray[np.uint8] | DeviceMemory


def memory_of(tensor: Tensor) -> Memory:
    """The memory of a contiguous tensor, which it keeps alive."""
    flat = tensor.view(torch.uint8)
    return DeviceMemory(flat) if flat.is_cuda else flat.numpy()


def tensor_of(memory: Memory) -> Tensor:
    """A tensor of bytes in this memory, with a storage of its own."""
    if isinstance(memory, DeviceMemory):
        return torch.as_tensor(memory, device=memory.device)
    return torch.from_numpy(memory)
