"""Small tensors of fixed numbers, made once for each device.

What comes from the host waits for all that a GPU has been given to do.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=1024)
def constant(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """The tensor of these whole numbers, to which nobody writes."""
    with torch.inference_mode(False):  # autograd may save it later
        return torch.tensor(numbers, dtype=torch.int64, device=device)
