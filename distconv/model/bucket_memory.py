"""Memory whose slices are objects, by which it is known whether anybody still uses them.

A tensor made of a slice keeps it alive, as does every view of that tensor. numpy's arrays are such
slices of the memory of a CPU.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor


class DeviceMemory:
    """Elements on a GPU, which are sliced as numpy's arrays are: a slice keeps the whole alive."""

    def __init__(self, tensor: Tensor, whole: DeviceMemory | None = None):
        self._tensor, self._whole = tensor, whole

    def __getitem__(self, part: slice) -> DeviceMemory:
        return DeviceMemory(self._tensor[part], self._whole or self)

    @property
    def device(self) -> torch.device:
        """Return the GPU."""
        return self._tensor.device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        description: dict[str, Any] = self._tensor.__cuda_array_interface__
        return description


BucketMemory: TypeAlias = NDArray[Any] | DeviceMemory


def memory_of_tensor(tensor: Tensor) -> BucketMemory:
    """Return the memory of a contiguous tensor, which it keeps alive; sliced by elements."""
    flat = tensor.view(_STAND_IN.get(tensor.dtype, tensor.dtype))
    return DeviceMemory(flat) if flat.is_cuda else flat.numpy()


def tensor_on_memory(memory: BucketMemory, dtype: torch.dtype) -> Tensor:
    """Return a tensor of `dtype` on the memory of such a tensor, with a storage of its own."""
    if isinstance(memory, DeviceMemory):
        flat = torch.as_tensor(memory, device=memory.device)
    else:
        flat = torch.from_numpy(memory)
    return flat.view(dtype) if dtype in _STAND_IN else flat


_STAND_IN = {torch.bfloat16: torch.int16}
"""Types that numpy does not have, and those under which it sees their memory."""
