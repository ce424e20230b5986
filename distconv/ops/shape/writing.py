"""Copies of tensors with positions overwritten or added to: index_add, select_scatter and so on.

Each rank writes to its block; the new values are made whole along the indexed dimension first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distconv.ops.shape.lookup import wrap_negative
from distconv.ops.support.argument_forms import normalize_dim, normalize_dims
from distconv.ops.support.in_place import implements_in_place
from distconv.ops.support.metadata_checks import check_on_meta
from distconv.ops.support.operands import (
    as_distributed,
    common_grid,
    gather_whole,
    local_operand,
    uncut,
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
    """Return `input` as a DistTensor, `dim` counted from 0, and all positions in `index`.

    The positions are gathered on every rank and counted from 0. Raises for positions out of range,
    on every rank. `name` is the called function, for errors.
    """
    x = as_distributed(input, common_grid(name, (input, index, *others)))
    if not x.dim():
        refuse(name, "the tensor has no dimensions", x, way_out="Use x.reshape(1)")
    d = normalize_dim(dim, x.dim())
    n = x.shape[d]
    places = gather_whole(index, name).reshape(-1)
    within = ((places >= -n) & (places < n)).all()
    assert_async(within, f"{name}: not all positions lie in dimension {d}, of {n} elements")
    return x, d, wrap_negative(places, n)


def _placed(
    name: str, input: Tensor, dim: int, index: Tensor, source: Tensor, *reduce: str, **options: Any
) -> DistTensor:
    """Return the result of torch's `name`, such as index_add; each rank computes its block.

    `reduce` is the argument of that name of index_reduce, and empty for other functions.
    """
    function: Callable[..., Tensor] = getattr(torch, name)
    check_on_meta(function, input, dim, index, source, *reduce, **options)
    x, d, places = _places(name, input, dim, index, source)
    shape = (*x.shape[:d], len(places), *x.shape[d + 1 :])
    cuts = (*x.cuts[:d], (), *x.cuts[d + 1 :])
    slices = local_operand(source, shape, cuts, x.grid, name)
    start, stop = x.box.start[d], x.box.stop[d]
    # Values for other blocks go to an extra slice, so that nobody waits to count them.
    here = torch.where((places >= start) & (places < stop), places - start, stop - start)
    spare = x.shard.new_ones([1 if i == d else m for i, m in enumerate(x.shard.shape)])
    block = torch.cat([x.shard, spare], d)
    written = function(block, d, here.to(index.dtype), slices, *reduce, **options)
    return DistTensor(written.narrow(d, 0, stop - start), x.shape, x.cuts, x.grid)


@implements(torch.take, torch.Tensor.take)
def take(input: Tensor, index: Tensor) -> DistTensor:
    """Return the elements at positions of the flattened tensor, which is made whole first."""
    grid = common_grid("take", (input, index))
    shape = check_on_meta(torch.take, input, index)
    places = as_distributed(index, grid)
    whole = gather_whole(input, "take")
    return DistTensor(whole.take(places.shard), shape, places.cuts, grid)


implements_in_place(Tensor.index_fill_, index_fill)
for _name in ("index_add", "index_copy", "index_reduce"):
    _rule = implements(getattr(torch, _name), getattr(Tensor, _name))(partial(_placed, _name))
    implements_in_place(getattr(Tensor, f"{_name}_"), _rule)
