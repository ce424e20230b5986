"""Copies of tensors with positions overwritten or added to: index_add, select_scatter and so on.

Each rank writes to its block; the new values are made whole along the indexed dimension first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from distconv.ops.shape.lookup import wrap_negative
from distconv.ops.shape.masks import check_mask
from distconv.ops.support.argument_forms import normalize_dim, normalize_dims
from distconv.ops.support.in_place import implements_in_place
from distconv.ops.support.metadata_checks import check_on_meta
from distconv.ops.support.operands import (
    as_distributed,
    broadcast_shape,
    common_grid,
    gather_whole,
    local_operand,
    uncut,
    unravel,
)
from distconv.tensor.dispatch import implements, refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.nested import tensors_in
from distconv.torch_private import assert_async


@implements(torch.select_scatter, torch.Tensor.select_scatter)
def select_scatter(input: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    check_on_meta(torch.select_scatter, input, src, dim, index)
    d = normalize_dim(dim, input.dim())
    return _written("select_scatter", input, src, (*(slice(None),) * d, index))


@implements(torch.slice_scatter, torch.Tensor.slice_scatter)
def slice_scatter(
    input: Tensor,
    src: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Tensor:
    check_on_meta(torch.slice_scatter, input, src, dim, start, end, step)
    d = normalize_dim(dim, input.dim())
    place = (*(slice(None),) * d, slice(start, end, step))
    return _written("slice_scatter", input, src, place)


def _written(name: str, input: Tensor, src: Tensor, place: Any) -> Tensor:
    result = as_distributed(input, common_grid(name, (input, src))).clone()
    result[place] = src
    return result


@implements(torch.diagonal_scatter, torch.Tensor.diagonal_scatter)
def diagonal_scatter(
    input: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> DistTensor:
    """Return a copy with `src` on a diagonal of two dimensions, which become whole."""
    name = "diagonal_scatter"
    grid = common_grid(name, (input, src))
    shape = check_on_meta(torch.diagonal_scatter, input, src, offset, dim1, dim2)
    given = as_distributed(input, grid)
    pair = normalize_dims((dim1, dim2), given.dim())
    x = uncut(given, pair, name)
    lead = [d for d in range(x.dim()) if d not in pair]
    cuts = (*(x.cuts[d] for d in lead), ())
    own = local_operand(src, tuple(src.shape), cuts, grid, name)
    return DistTensor(x.shard.diagonal_scatter(own, offset, *pair), shape, x.cuts, grid)


@implements(torch.index_fill, torch.Tensor.index_fill)
def index_fill(input: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    check_on_meta(torch.index_fill, input, dim, index, value)
    x, d, places = _places("index_fill", input, dim, index, *tensors_in(value))
    mask = torch.zeros(x.shape[d], dtype=torch.bool, device=x.device)
    mask[places] = True
    return x.masked_fill(mask.view(-1, *(1,) * (x.dim() - 1 - d)), value)


def _places(
    name: str, input: Tensor, dim: int, index: Tensor, *others: Tensor
) -> tuple[DistTensor, int, Tensor]:
    """Return `input` as a DistTensor, `dim` counted from 0, and the positions of `_whole_places`.

    `name` is the called function, for errors.
    """
    x = as_distributed(input, common_grid(name, (input, index, *others)))
    if not x.dim():
        refuse(name, "the tensor has no dimensions", x, way_out="Use x.reshape(1)")
    d = normalize_dim(dim, x.dim())
    return x, d, _whole_places(name, index.reshape(-1), x.shape[d], f"dimension {d}")


def _whole_places(name: str, index: Tensor, n: int, among: str) -> Tensor:
    """Return all positions in `index`, counted from 0 on, on every rank. Collective.

    Raises on every rank for positions out of range, of `n` elements. `name` is the called function,
    and `among` is what has the elements, for the error.
    """
    places = gather_whole(index, name)
    within = ((places >= -n) & (places < n)).all()
    assert_async(within, f"{name}: not all positions lie in {among}, of {n} elements")
    return wrap_negative(places, n)


def _placed(
    name: str, input: Tensor, dim: int, index: Tensor, source: Tensor, *reduce: str, **options: Any
) -> DistTensor:
    """Return the result of torch's `name`, such as index_add; each rank computes its block.

    `reduce` is the argument of that name of index_reduce, and empty for other functions.
    """
    function: Callable[..., Tensor] = getattr(torch, name)
    check_on_meta(function, input, dim, index, source, *reduce, **options)
    x, d, places = _places(name, input, dim, index)
    return _written_at(function, x, d, [places], source, *reduce, **options)


def _written_at(
    function: Callable[..., Tensor],
    x: DistTensor,
    first: int,
    places: Sequence[Tensor],
    source: Tensor,
    *reduce: str,
    **options: Any,
) -> DistTensor:
    """Return the result of `function`, such as torch.index_add; each rank computes its block.

    Parameters
    ----------
    places: for each dimension from `first` on, a vector of whole positions, counted from 0.
    source: the values, (*dimensions before, positions, *dimensions after).
    """
    name, last = function.__name__, first + len(places)
    shape = (*x.shape[:first], len(places[0]), *x.shape[last:])
    cuts = (*x.cuts[:first], (), *x.cuts[last:])
    slices = local_operand(source, shape, cuts, x.grid, name)
    own = x.shard.shape[first:last]
    # Values for other blocks go to an extra slice, so that nobody waits to count them.
    spare = prod(own)
    here: Any = 0
    within: Any = True
    for place, start, n in zip(places, x.box.start[first:last], own, strict=True):
        here = here * n + place - start
        within = within & (place >= start) & (place < start + n)
    block = x.shard.flatten(first, last - 1)
    extra = block.new_ones([1 if d == first else n for d, n in enumerate(block.shape)])
    block = torch.cat([block, extra], first)
    written = function(block, first, here.where(within, spare), slices, *reduce, **options)
    return DistTensor(written.narrow(first, 0, spare).view(x.shard.shape), x.shape, x.cuts, x.grid)


@implements(torch.take, torch.Tensor.take)
def take(input: Tensor, index: Tensor) -> DistTensor:
    """Return the elements at positions of the flattened tensor, which is made whole first."""
    grid = common_grid("take", (input, index))
    shape = check_on_meta(torch.take, input, index)
    places = as_distributed(index, grid)
    whole = gather_whole(input, "take")
    return DistTensor(whole.take(places.shard), shape, places.cuts, grid)


@implements(torch.put, torch.Tensor.put)
def put(input: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """Return a copy with values at positions of the flattened tensor, written or added."""
    x = as_distributed(input, common_grid("put", (input, index, source)))
    if index.dtype != torch.int64 or source.dtype != x.dtype:
        raise RuntimeError(
            f"put: an index of {index.dtype} and values of {source.dtype} for a tensor of "
            f"{x.dtype}; expected torch.int64 and {x.dtype}"
        )
    if index.numel() != source.numel():
        raise IndexError(f"put: {source.numel()} values for {index.numel()} positions")
    if not x.dim():
        return put(x.reshape(1), index, source, accumulate).reshape(())
    places = _whole_places("put", index.reshape(-1), x.numel(), "the flattened tensor")
    function = torch.index_add if accumulate else torch.index_copy
    return _written_at(function, x, 0, unravel(places, x.shape), source.reshape(-1))


def added_at(input: Tensor, indices: Sequence[Tensor], values: Tensor) -> DistTensor:
    """Return a copy with `values` added at positions, as index_put(accumulate=True). Collective.

    `indices` are positions or masks of the first dimensions. Each rank adds to its block.
    """
    name = "index_put"
    x = as_distributed(input, common_grid(name, tensors_in(input, indices, values)))
    if values.dtype != x.dtype:
        raise RuntimeError(
            f"{name}: values of {values.dtype} for a tensor of {x.dtype}; convert them"
        )
    found: list[Tensor] = []
    for item in indices:
        if item.dtype in (torch.int32, torch.int64):
            found.append(item)
            continue
        if item.dtype not in (torch.bool, torch.uint8):
            raise IndexError(f"{name}: an index of {item.dtype}; expected positions, or a mask")
        if not item.dim():
            refuse(name, "a mask without dimensions is not supported", x, way_out="Use torch.where")
        check_mask(item, tuple(x.shape[len(found) : len(found) + item.dim()]), x)
        found += item.nonzero().unbind(1)
    if not 0 < len(found) <= x.dim():
        raise IndexError(f"{name}: {len(found)} indices; expected 1 to {x.dim()}")
    picked, rest = broadcast_shape(name, found), tuple(x.shape[len(found) :])
    places = [
        _whole_places(name, item.expand(picked).reshape(-1), n, f"dimension {d}")
        for d, (item, n) in enumerate(zip(found, x.shape, strict=False))
    ]
    rows = values.expand(*picked, *rest).reshape(prod(picked), *rest)
    return _written_at(torch.index_add, x, 0, places, rows)


implements_in_place(Tensor.put_, put)
implements_in_place(Tensor.index_fill_, index_fill)
for _name in ("index_add", "index_copy", "index_reduce"):
    _rule = implements(getattr(torch, _name), getattr(Tensor, _name))(partial(_placed, _name))
    implements_in_place(getattr(Tensor, f"{_name}_"), _rule)
