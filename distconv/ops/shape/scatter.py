"""Values written, or added, to the positions that a tensor of indices names along one dimension.

That dimension is made whole first, and the result is cut as the input was. One-hot classes, along a
new dimension, are written without moving anything. The rank that meets a class out of range raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.ops.support.argument_forms import normalize_dim
from distconv.ops.support.in_place import implements_in_place
from distconv.ops.support.metadata_checks import check_on_meta
from distconv.ops.support.operands import (
    as_distributed,
    common_grid,
    gather_whole,
    local_operand,
    uncut,
)
from distconv.tensor.dispatch import RULES, implements, refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.nested import tensors_in
from distconv.tensor.redistribution import redistribute


def _scatter(function: Callable[..., Tensor], *others: Callable[..., Tensor]) -> None:
    name = function.__name__

    @implements(function, *others)
    def rule(input: Tensor, dim: int, index: Tensor, *values: Any, **options: Any) -> DistTensor:
        grid = common_grid(name, (input, index, *values, *options.values()))
        shape = check_on_meta(function, input, dim, index, *values, **options)
        x = as_distributed(input, grid)
        if not x.dim() or x.dim() != index.dim():
            refuse(
                name,
                f"an index of {index.dim()} dimensions for an input of {x.dim()} is not supported",
                x,
                index,
                way_out="Use x.full_tensor()",
            )
        d = normalize_dim(dim, x.dim())
        # Where the index is shorter than the input their blocks do not line up.
        shorter = [i for i, n in enumerate(index.shape) if i != d and n != x.shape[i]]
        whole = uncut(x, [d, *shorter], name)

        def own(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            for i, n in enumerate(value.shape):
                if i == d or i in shorter:
                    continue
                # Of the values, torch reads no more than there are indices.
                value = value.narrow(i, 0, index.shape[i]) if n != index.shape[i] else value
            return local_operand(value, tuple(value.shape), whole.cuts, grid, name)

        arguments = [own(value) for value in (index, *values)]
        named = {key: own(value) for key, value in options.items()}
        shard = function(whole.shard, d, *arguments, **named)
        return redistribute(DistTensor(shard, shape, whole.cuts, grid), x.cuts, name)


_scatter(torch.scatter, torch.Tensor.scatter)
_scatter(torch.scatter_add, torch.Tensor.scatter_add)
_scatter(torch.scatter_reduce, torch.Tensor.scatter_reduce)


def _in_place(name: str) -> None:
    function = getattr(torch.Tensor, f"{name}_")

    def into_plain(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        operands = tensors_in(input, args, kwargs)
        if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
            refuse(
                f"{name}_",
                "a plain tensor takes distributed values in place only outside autograd",
                *operands,
                way_out=f"Use the function that returns a new tensor, torch.{name}",
            )
        whole = (gather_whole(x, f"{name}_") for x in args)
        named = {key: gather_whole(x, f"{name}_") for key, x in kwargs.items()}
        result: Tensor = function(input, *whole, **named)
        return result

    implements_in_place(function, RULES[getattr(torch, name)], into_plain)


for _name in ("scatter", "scatter_add", "scatter_reduce"):
    _in_place(_name)


@implements(F.one_hot)
def one_hot(tensor: DistTensor, num_classes: int = -1) -> DistTensor:
    """Return 1 at the class of each element along a new last dimension, which is whole; 0
    elsewhere.
    """
    check_on_meta(F.one_hot, tensor, max(num_classes, 1))
    if num_classes < 0:
        num_classes = int(tensor.max().item()) + 1
    shard = F.one_hot(tensor.shard, num_classes)
    return DistTensor(shard, (*tensor.shape, num_classes), (*tensor.cuts, ()), tensor.grid)
