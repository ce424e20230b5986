"""A slice of memory keeps the whole alive, and shows that it is in use, on CPUs and GPUs alike."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

import pytest
import torch
from torch import Tensor

from distconv.model.bucket_memory import (
    BucketMemory,
    DeviceMemory,
    memory_of_tensor,
    tensor_on_memory,
)

KINDS: dict[str, Callable[[Tensor], BucketMemory]] = {"cpu": memory_of_tensor, "gpu": DeviceMemory}
"""Kinds of memory; a GPU's is sliced the same wherever its bytes are."""


@pytest.mark.parallel([1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_slice_keeps_the_whole_alive_and_no_longer(kind: str) -> None:
    memory = KINDS[kind](torch.zeros(8, dtype=torch.uint8))
    whole, part = ref(memory), memory[2:6]
    half = part[1:2]
    del memory, part
    assert whole() is not None
    del half
    assert whole() is None


@pytest.mark.parallel([1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_slice_is_in_use_as_long_as_a_tensor_or_view_of_it(dtype: torch.dtype) -> None:
    memory = memory_of_tensor(torch.zeros(8, dtype=dtype))
    part = memory[1:3]
    tensor, used = tensor_on_memory(part, dtype), ref(part)
    assert tensor.dtype == dtype
    tensor.fill_(3)
    assert tensor_on_memory(memory, dtype).tolist() == [0, 3, 3, 0, 0, 0, 0, 0]
    view = tensor[1:].detach()
    del part, tensor
    assert used() is not None
    del view
    assert used() is None
