"""Small tensors of fixed numbers, made once for each device.

What comes from the host waits for all that a GPU has been given to do. They are kept for good: a
captured graph of CUDA reads them where they are.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def constant(
    numbers: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """The tensor of these whole numbers, to which nobody writes."""
    with torch.inference_mode(False):  # autograd may save it later
        return torch.tensor(numbers, dtype=dtype, device=device)
