"""Merged tensors: reshapes that combine partitioned dimensions without sending elements.

If x, (sample, channel, height, width), is partitioned over height, the first dimension of
`x.permute(0, 2, 3, 1).flatten(0, 2)` takes its rows from all ranks alternately, so that the blocks
of the reshaped tensor have most of their elements on other ranks. The result of such a reshape is
therefore a merged tensor. Its attribute `unmerged` is the tensor before the reshape. The dimensions
of `unmerged` that a dimension combines are its factors. Functions that treat all rows equally
compute on `unmerged`, and return merged tensors (`dimensions.py`). Reading the `shard` of a merged
tensor redistributes its elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import prod
from typing import Any, cast

from torch import Tensor

from distconv.geometry.layout import Shape, common_factors, runs_of_factors
from distconv.tensor.dist_tensor import DistTensor


def is_merged(x: Any) -> bool:
    """Return whether `x` is a merged DistTensor: a reshape whose own blocks are on other ranks."""
    return isinstance(x, DistTensor) and x.unmerged is not None


def factors_of(x: Tensor) -> tuple[Shape, ...]:
    """Return the factors of each dimension of `x`: sizes of the dimensions of `x.unmerged` in it.

    If `x` is not merged, each dimension has its own size as its only factor.
    """
    if isinstance(x, DistTensor) and x.unmerged is not None:
        return runs_of_factors(tuple(x.unmerged.shape), tuple(x.shape))
    return tuple((n,) for n in x.shape)


def places_of_factors(x: DistTensor) -> list[list[int]]:
    """Return, for each dimension of `x`, the dimensions of `x.unmerged` that it combines."""
    places, i = [], 0
    for run in factors_of(x):
        places.append(list(range(i, i + len(run))))
        i += len(run)
    return places


def fitting_factors(
    operands: Sequence[Sequence[Shape]], shape: Sequence[int]
) -> tuple[Shape, ...] | None:
    """Return factors, for each dimension of `shape`, into which all operands can be split.

    `operands` has, for each operand, the factors of each of its dimensions. The operands are
    broadcast to `shape`. Returns None if there are no common factors.
    """
    splits: list[list[Shape]] = [[(n,)] for n in shape]
    for runs in operands:
        for rows, run, n in zip(splits[::-1], runs[::-1], shape[::-1], strict=False):
            if prod(run) == n:
                rows.append(run)
    found = [common_factors(rows) for rows in splits]
    return None if None in found else cast("tuple[Shape, ...]", tuple(found))


def unmerge(x: Tensor, factors: Sequence[Shape]) -> Tensor:
    """Return `x` with each dimension split into its `factors`.

    If `factors` has more items than `x` has dimensions, the last items count. A dimension of size 1
    that is broadcast is split into ones.
    """
    own = factors[len(factors) - x.dim() :]
    sizes = zip(x.shape, own, strict=True)
    shape = tuple(chain.from_iterable(f if n == prod(f) else (1,) * len(f) for n, f in sizes))
    if isinstance(x, DistTensor) and x.unmerged is not None and x.unmerged.shape == shape:
        return x.unmerged
    return x if shape == tuple(x.shape) else x.reshape(shape)


def unmerged(x: Tensor) -> DistTensor:
    """Return `x.unmerged`, the tensor before the reshape, of a merged tensor `x`."""
    return cast(DistTensor, cast(DistTensor, x).unmerged)


def in_blocks(x: Tensor) -> Tensor:
    """Return `x`; a merged tensor is redistributed to blocks of its own shape. Collective."""
    if isinstance(x, DistTensor) and x.unmerged is not None:
        return DistTensor(x.shard, x.shape, x.cuts, x.grid)
    return x


def merge_as(result: Any, shape: Sequence[int]) -> Any:
    """Return the tensor `result`, computed on unmerged tensors, as a merged tensor of `shape`.

    Other results are returned unchanged.
    """
    return result.view(tuple(shape)) if isinstance(result, Tensor) else result
