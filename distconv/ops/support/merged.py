"""Merged tensors: reshapes whose cut dimensions have become inner factors of others.

Where x, (sample, channel, height, width), is cut in height, rows of all ranks take turns in
`x.permute(0, 2, 3, 1).flatten(0, 2)`, so canonical blocks would have to be moved. The result keeps
the tensor before the reshape, `unmerged`. Functions that treat all rows alike work on `unmerged`,
and their results are merged, too (`dimensions.py`); reading the `shard` of a merged tensor moves
its blocks.
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
    """Return whether `x` is a merged DistTensor, which is not cut in blocks."""
    return isinstance(x, DistTensor) and x.unmerged is not None


def factors_of(x: Tensor) -> tuple[Shape, ...]:
    """Return for each dimension of `x` the sizes of the unmerged dimensions that it merges.

    If `x` is not merged, each dimension has its own size as its only factor.
    """
    if isinstance(x, DistTensor) and x.unmerged is not None:
        return runs_of_factors(tuple(x.unmerged.shape), tuple(x.shape))
    return tuple((n,) for n in x.shape)


def places_of_factors(x: DistTensor) -> list[list[int]]:
    """Return for each dimension of `x` the dimensions of `x.unmerged` that are its factors."""
    places, i = [], 0
    for run in factors_of(x):
        places.append(list(range(i, i + len(run))))
        i += len(run)
    return places


def fitting_factors(
    operands: Sequence[Sequence[Shape]], shape: Sequence[int]
) -> tuple[Shape, ...] | None:
    """Return for each dimension of `shape` the factors into which all operands can be split.

    `operands` has for each operand the factors of its dimensions; operands are broadcast to
    `shape`. Returns None if the factors of the operands do not fit together.
    """
    splits: list[list[Shape]] = [[(n,)] for n in shape]
    for runs in operands:
        for rows, run, n in zip(splits[::-1], runs[::-1], shape[::-1], strict=False):
            if prod(run) == n:
                rows.append(run)
    found = [common_factors(rows) for rows in splits]
    return None if None in found else cast("tuple[Shape, ...]", tuple(found))


def unmerge(x: Tensor, factors: Sequence[Shape]) -> Tensor:
    """Return `x` with each dimension split into its `factors`; size 1 is split into ones."""
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
    """Return a tensor with the same elements that is not merged. Collective."""
    if isinstance(x, DistTensor) and x.unmerged is not None:
        return DistTensor(x.shard, x.shape, x.cuts, x.grid)
    return x


def merge_as(result: Any, shape: Sequence[int]) -> Any:
    """Return `result`, computed on unmerged tensors, as a view of this merged shape."""
    return result.view(tuple(shape)) if isinstance(result, Tensor) else result
