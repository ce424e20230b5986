"""Elements and positions whose number depends on the values; all of them, whole on every rank.

The tensor is made whole first. Every rank then finds the same number of elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distconv.ops.support.operands import (
    as_distributed,
    broadcast_shape,
    common_grid,
    gather_whole,
)
from distconv.tensor.dispatch import RULES, implements
from distconv.tensor.dist_tensor import DistTensor


def _found(function: Callable[..., Any]) -> None:
    """Return a function of one tensor, of which it returns one or several."""

    def rule(input: DistTensor, *args: Any, **kwargs: Any) -> Any:
        result = function(gather_whole(input, function.__name__), *args, **kwargs)
        if isinstance(result, Tensor):
            return as_distributed(result, input.grid)
        return tuple(as_distributed(part, input.grid) for part in result)

    RULES[function] = rule


for _home in (torch, torch.Tensor):
    for _name in ("argwhere", "nonzero", "nonzero_static", "unique", "unique_consecutive"):
        if hasattr(_home, _name):
            _found(getattr(_home, _name))


@implements(torch.masked_select, torch.Tensor.masked_select)
def masked_select(input: Tensor, mask: Tensor) -> DistTensor:
    """Return the elements where a mask is true, as a vector."""
    if mask.dtype != torch.bool:
        raise RuntimeError(f"masked_select: a mask of {mask.dtype}; expected torch.bool")
    grid = common_grid("masked_select", (input, mask))
    broadcast_shape("masked_select", (input, mask))
    x, chosen = (gather_whole(t, "masked_select") for t in (input, mask))
    return as_distributed(x.masked_select(chosen), grid)
