"""Elements at positions given by tensors along one dimension, which is made whole first.

The result is cut as the input, or as the tensor of positions if the input is whole: each rank looks
up the positions in its own block. The rank that meets a position out of range raises.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.geometry.layout import Shape, cutting_axes, replaced_at
from distconv.ops.support.argument_forms import normalize_dim
from distconv.ops.support.merged import (
    factors_of,
    fitting_factors,
    is_merged,
    merge_as,
    unmerge,
    unmerged,
)
from distconv.ops.support.metadata_checks import check_on_meta
from distconv.ops.support.operands import (
    as_distributed,
    common_grid,
    gather_whole,
    local_operand,
    uncut,
)
from distconv.ops.support.ranges import in_range
from distconv.tensor.dispatch import implements, refuse
from distconv.tensor.dist_tensor import DistTensor


def wrap_negative(index: Tensor, size: int) -> Tensor:
    """Return positions from 0 on; negative ones are counted from the end, as in Python."""
    counted: Tensor = index + size * (index < 0)
    return counted


@implements(torch.index_select, torch.Tensor.index_select)
def index_select(input: Tensor, dim: int, index: Tensor) -> DistTensor:
    grid = common_grid("index_select", (input, index))
    x = as_distributed(input, grid)
    if index.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"index_select: an index of {index.dtype}; expected int32 or int64")
    if index.dim() > 1:
        raise IndexError(f"index_select: an index of shape {tuple(index.shape)} is no vector")
    shape = check_on_meta(torch.index_select, input, dim, index)
    if not x.dim():
        refuse("index_select", "the tensor has no dimensions", x, way_out="Use x.reshape(1)")
    d = normalize_dim(dim, x.dim())
    vector = index if index.dim() else index.reshape(1)
    own = local_operand(vector, shape[d : d + 1], x.cuts[d : d + 1], grid, "index_select")
    whole = uncut(x, [d], "index_select").shard
    with in_range("index_select, position", own, x.shape[d]):
        shard = whole.index_select(d, own)
    return DistTensor(shard, shape, x.cuts, grid)


def rows_of(table: DistTensor, index: DistTensor) -> DistTensor:
    """Return `table[index]`, cut as `index` is; the table is whole on every rank."""
    own = wrap_negative(index.shard, len(table))
    with in_range("indexing, position", own, len(table)):
        shard = table.shard[own]
    shape = *index.shape, *table.shape[1:]
    return DistTensor(shard, shape, (*index.cuts, *table.cuts[1:]), index.grid)


@implements(torch.gather, torch.Tensor.gather)
def gather(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> DistTensor:
    grid = common_grid("gather", (input, index))
    x = as_distributed(input, grid)
    shape = check_on_meta(torch.gather, input, dim, index)
    if sparse_grad or not x.dim() or x.dim() != index.dim():
        what = "sparse_grad" if sparse_grad else f"{x.dim()} dimensions for {index.dim()} of index"
        refuse("gather", f"{what} is not supported", x, index, way_out="Use x.full_tensor()")
    d = normalize_dim(dim, x.dim())
    if (is_merged(input) or is_merged(index)) and (factors := _shared_factors(x, index, d)):
        place = sum(len(run) for run in factors[:d])
        named = unmerge(index, (*factors[:d], (index.shape[d],), *factors[d + 1 :]))
        return cast(DistTensor, merge_as(gather(unmerge(input, factors), place, named), shape))
    # Where the index is shorter than the input their blocks do not match.
    shorter = [i for i, n in enumerate(shape) if i != d and n != x.shape[i]]
    table = uncut(x, [d, *shorter], "gather")
    cuts = list(table.cuts)
    # Where the input is whole, each rank looks up its own block of the index.
    for i, axes in enumerate(as_distributed(index, grid).cuts):
        if not cuts[i] and i not in shorter and not set(axes) & set(cutting_axes(cuts)):
            cuts[i] = axes
    own = local_operand(index, shape, tuple(cuts), grid, "gather")
    along = replaced_at(tuple(cuts), d, ())
    here = local_operand(table, tuple(x.shape), along, grid, "gather")
    with in_range("gather, position", own, x.shape[d]):
        shard = here.gather(d, own)
    return DistTensor(shard, shape, tuple(cuts), grid)


def _shared_factors(input: Tensor, index: Tensor, d: int) -> tuple[Shape, ...] | None:
    """Return the factors of each dimension that fit both `input` and `index`; `d` stays one.

    Returns None if no factors fit, if `d` is merged, or if the sizes of another dimension differ.
    """
    runs = [factors_of(input), factors_of(index)]
    if any(len(run[d]) > 1 for run in runs):
        return None
    if any(
        i != d and n != m for i, (n, m) in enumerate(zip(input.shape, index.shape, strict=True))
    ):
        return None
    factors = fitting_factors([replaced_at(run, d, ()) for run in runs], input.shape)
    return factors and replaced_at(factors, d, (input.shape[d],))


@implements(torch.take_along_dim, torch.Tensor.take_along_dim)
def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> DistTensor:
    """Return torch.gather along `dim`, with the other dimensions broadcast against each other."""
    if indices.dtype != torch.int64:
        raise RuntimeError(
            f"take_along_dim: indices of {indices.dtype}; expected int64, as indices.long() gives"
        )
    if dim is None:
        return gather(input.flatten(), 0, indices.flatten())
    if input.dim() != indices.dim():
        raise RuntimeError(
            f"take_along_dim: input {tuple(input.shape)} and indices {tuple(indices.shape)} have "
            "to have the same number of dimensions"
        )
    if not input.dim():
        refuse("take_along_dim", "there are no dimensions", input, way_out="Use x.reshape(1)")
    d = normalize_dim(dim, input.dim())
    shapes = [torch.Size((*t.shape[:d], 1, *t.shape[d + 1 :])) for t in (input, indices)]
    rest = torch.broadcast_shapes(*shapes)
    x, index = (t.expand(*rest[:d], t.shape[d], *rest[d + 1 :]) for t in (input, indices))
    # torch counts around the end here, where gather refuses positions out of range.
    return gather(x, d, index.remainder(max(x.shape[d], 1)))


@implements(F.embedding)
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> DistTensor:
    """Return the row of `weight` at each position in `input`; every rank gathers the weight."""
    grid = common_grid("embedding", (input, weight))
    if max_norm is not None or scale_grad_by_freq or sparse:
        reason = "max_norm, scale_grad_by_freq and sparse are not supported"
        refuse("embedding", reason, input, weight, way_out="Leave them out")
    if input.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"embedding: positions of {input.dtype}; expected int32 or int64")
    shape = check_on_meta(F.embedding, input, weight, padding_idx)
    if is_merged(input):
        return cast(DistTensor, merge_as(embedding(unmerged(input), weight, padding_idx), shape))
    x = as_distributed(input, grid)
    table = gather_whole(weight, "embedding")
    own = x.shard
    if input.numel() and not own.numel():
        # Without positions torch cannot differentiate its gradient.
        own = own.new_zeros([max(n, 1) for n in own.shape])
    with in_range("embedding, position", own, len(table)):
        shard = F.embedding(own, table, padding_idx)[tuple(slice(n) for n in x.shard.shape)]
    return DistTensor(shard, shape, (*x.cuts, ()), grid)


@implements(torch.embedding)
def _embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> DistTensor:
    padding = None if padding_idx == -1 else padding_idx
    options: Any = dict(scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
    return embedding(indices, weight, padding, **options)
