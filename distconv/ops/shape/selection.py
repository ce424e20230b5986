"""Elements and positions whose number depends on the values, all whole on every rank.

Each rank finds positions in its own block. Unique elements are searched in the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distconv.ops.shape.masks import positions
from distconv.ops.support.operands import as_distributed
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor


def _positions(function: Callable[..., Any]) -> None:
    @implements(function)
    def rule(input: DistTensor, *, as_tuple: bool = False) -> Any:
        found = positions(input, "nonzero")
        if not as_tuple:
            return found
        if not input.dim():  # torch treats it as a vector
            return (as_distributed(found.shard.new_zeros(len(found)), input.grid),)
        return found.unbind(1)


for _home in (torch, torch.Tensor):
    for _name in ("argwhere", "nonzero"):
        _positions(getattr(_home, _name))
