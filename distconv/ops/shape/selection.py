"""Elements and positions whose number depends on the values, all whole on every rank.

Each rank finds positions in its own block. Unique elements are searched in the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distconv.ops.shape.masks import positions
from distconv.ops.support.operands import as_distributed, gather_whole
from distconv.tensor.dispatch import RULES, implements
from distconv.tensor.dist_tensor import DistTensor


def _found(function: Callable[..., Any]) -> None:
    """Register a function of one tensor, with one or several results."""

    def rule(input: DistTensor, *args: Any, **kwargs: Any) -> Any:
        result = function(gather_whole(input, function.__name__), *args, **kwargs)
        if isinstance(result, Tensor):
            return as_distributed(result, input.grid)
        return tuple(as_distributed(part, input.grid) for part in result)

    RULES[function] = rule


for _home in (torch, torch.Tensor):
    for _name in ("nonzero_static", "unique", "unique_consecutive"):
        if hasattr(_home, _name):
            _found(getattr(_home, _name))


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
