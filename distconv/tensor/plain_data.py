"""Assignment of a DistTensor to `.data` of a plain tensor, which torch does without asking it."""

from __future__ import annotations

from typing import Any

import torch

from distconv.tensor.base import DistTensorBase

_DATA: Any = vars(torch._C.TensorBase)["data"]


def _assign(self: torch.Tensor, value: Any) -> None:
    """Let a tensor hold the elements of another one; of a DistTensor all of them.

    All ranks of the grid of a DistTensor call it together.
    """
    if isinstance(value, DistTensorBase) and not isinstance(self, DistTensorBase):
        with torch.no_grad():
            # Torch would copy the description of a tensor without memory, and end the program.
            value = value.full_tensor()  # type: ignore[attr-defined]
    _DATA.__set__(self, value)


torch.Tensor.data = property(_DATA.__get__, _assign)  # type: ignore[assignment, method-assign]
