"""Values written, or added, to positions along one dimension, given by a tensor of indices.

That dimension is made whole first, and the result is cut as the input was. If more values than
elements are added, as in a histogram, each rank adds up its own values, and then the ranks' sums
are added up. One-hot classes, along a new dimension, are written without moving anything. The rank
that meets a class out of range raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.comm.collectives import all_reduce_with_grad
from distconv.geometry.layout import cutting_axes
from distconv.grid.interface import Grid
from distconv.ops.support.argument_forms import normalize_dim
from distconv.ops.support.in_place import implements_in_place
from distconv.ops.support.merged import factors_of, is_merged, unmerge
from distconv.ops.support.metadata_checks import check_on_meta
from distconv.ops.support.operands import (
    as_distributed,
    common_grid,
    gather_whole,
    local_operand,
    uncut,
)
from distconv.ops.support.ranges import in_range
from distconv.tensor.dispatch import RULES, implements, refuse
from distconv.tensor.dist_tensor import DistTensor
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
        if name == "scatter_add" and _counts(x, d, index):
            given = (*values, *options.values())
            return as_distributed(x + _added_up(x, d, index, given[0], grid), grid)
        # Where the index is shorter than the input their blocks do not match.
        shorter = [i for i, n in enumerate(index.shape) if i != d and n != x.shape[i]]
        whole = uncut(x, [d, *shorter], name)

        def own(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            for i, n in enumerate(value.shape):
                if i == d or i in shorter:
                    continue
                # torch reads only as many values as there are indices.
                value = value.narrow(i, 0, index.shape[i]) if n != index.shape[i] else value
            return local_operand(value, tuple(value.shape), whole.cuts, grid, name)

        arguments = [own(value) for value in (index, *values)]
        named = {key: own(value) for key, value in options.items()}
        shard = function(whole.shard, d, *arguments, **named)
        return redistribute(DistTensor(shard, shape, whole.cuts, grid), x.cuts, name)


_scatter(torch.scatter, torch.Tensor.scatter)
_scatter(torch.scatter_add, torch.Tensor.scatter_add)
_scatter(torch.scatter_reduce, torch.Tensor.scatter_reduce)


def _counts(input: Tensor, d: int, index: Tensor) -> bool:
    """Return whether each rank should add up the values for its own block of the index.

    It should if the index has more elements than `input` and is cut or merged along `d`, but not
    merged along another dimension. Otherwise dimension `d` is made whole.
    """
    return (
        isinstance(index, DistTensor)
        and index.numel() > input.numel()
        and bool(index.cuts[d] or is_merged(index))
        and all(len(run) == 1 for i, run in enumerate(factors_of(index)) if i != d)
    )


def _added_up(input: Tensor, d: int, index: Tensor, src: Tensor, grid: Grid) -> DistTensor:
    """Return the sums to add to `input` by scatter_add, whole on every rank. Collective.

    Each rank adds up the values of `src` for its block of the index; then the ranks' sums are added
    up.
    """
    name = "scatter_add"
    runs = factors_of(index)
    shape = tuple(index.shape)
    own = as_distributed(unmerge(index, runs), grid)
    # torch reads only as many values as there are indices.
    for i, n in enumerate(shape):
        src = src.narrow(i, 0, n) if src.shape[i] != n else src
    values = local_operand(unmerge(src, runs), tuple(own.shape), own.cuts, grid, name)
    first, last = d, d + len(runs[d]) - 1
    start = (*own.box.start[:first], 0, *own.box.start[last + 1 :])
    sums = values.new_zeros(tuple(input.shape))
    lengths = (*own.box.shape[:first], input.shape[d], *own.box.shape[last + 1 :])
    box = tuple(slice(a, a + n) for a, n in zip(start, lengths, strict=True))
    block = values.new_zeros(lengths).scatter_add(
        d, own.shard.flatten(first, last), values.flatten(first, last)
    )
    sums[box] = block
    total = all_reduce_with_grad(sums, grid, cutting_axes(own.cuts))
    return as_distributed(total, grid)


def _count_into_plain(input: Tensor, dim: int, index: Tensor, src: Tensor) -> Any:
    """Add `src` to the plain tensor `input` at the positions `index`, as scatter_add_. Collective.

    Each rank adds up its block of `src`; then the ranks' sums are added up. Returns NotImplemented,
    and adds nothing, if `_counts` says that operands should be made whole instead, or dimensions do
    not match.
    """
    d = normalize_dim(dim, input.dim()) if input.dim() else 0
    if not input.dim() or input.dim() != index.dim() or not _counts(input, d, index):
        return NotImplemented
    grid = common_grid("scatter_add_", (index, src))
    return input.add_(gather_whole(_added_up(input, d, index, src, grid), "scatter_add_"))


for _name in ("scatter", "scatter_add", "scatter_reduce"):
    implements_in_place(
        getattr(torch.Tensor, f"{_name}_"),
        RULES[getattr(torch, _name)],
        _count_into_plain if _name == "scatter_add" else None,
    )


@implements(F.one_hot)
def one_hot(tensor: DistTensor, num_classes: int = -1) -> DistTensor:
    """Return one-hot vectors of class numbers along a new last dimension, which is whole."""
    check_on_meta(F.one_hot, tensor, max(num_classes, 1))
    if num_classes < 0:
        num_classes = int(tensor.max().item()) + 1
    with in_range("one_hot, class number", tensor.shard, num_classes):
        shard = F.one_hot(tensor.shard, num_classes)
    return DistTensor(shard, (*tensor.shape, num_classes), (*tensor.cuts, ()), tensor.grid)
