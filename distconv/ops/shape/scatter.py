"""Values written or added at given positions: scatter, index_add, select_scatter and others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.comm.collectives import all_reduce_with_grad
from distconv.geometry.layout import cutting_axes, replaced_at
from distconv.grid.interface import Grid
from distconv.ops.shape.lookup import check_mask, wrap_negative
from distconv.ops.shape.rows import RowExchange, check_range, row_exchange
from distconv.ops.support.arguments import check_on_meta, in_range, normalize_dim, normalize_dims
from distconv.ops.support.in_place import implements_in_place
from distconv.ops.support.merged import factors_of, is_merged, unmerge
from distconv.ops.support.operands import (
    as_distributed,
    box_on_rank,
    broadcast_shape,
    common_grid,
    gather_whole,
    local_operand,
    uncut,
    unravel,
)
from distconv.tensor.base import tensors_in
from distconv.tensor.dispatch import RULES, implements, refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import redistribute
from distconv.torch_private import assert_async

# Values written, or added, to positions along one dimension, given by a tensor of indices.
#
# The dimension is gathered first, and the result is partitioned as the input. If more values than
# elements are added, as in a histogram, each rank sums its own values, and an all-reduce sums over
# the ranks. one_hot writes classes along a new dimension without communication; only a rank that
# has a class out of range raises.


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
        if name == "scatter_add" and not (is_merged(index) and _counts(x, d, index)):
            cut = _partitioned_as_index(x, d, index)
            added = _added_to_rows(cut, d, index, *values, *options.values())
            if added is not None:
                return added
        if name == "scatter_add" and _counts(x, d, index):
            given = (*values, *options.values())
            return as_distributed(x + _summed_over_ranks(x, d, index, given[0], grid), grid)
        # Where the index is shorter than the input, their blocks have different positions.
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
        check_range(arguments[0], x.shape[d], x, whole.cuts, f"{name}, position")
        shard = function(whole.shard, d, *arguments, **named)
        return redistribute(DistTensor(shard, shape, whole.cuts, grid), x.cuts, name)


_scatter(torch.scatter, torch.Tensor.scatter)
_scatter(torch.scatter_add, torch.Tensor.scatter_add)
_scatter(torch.scatter_reduce, torch.Tensor.scatter_reduce)


def _partitioned_as_index(x: DistTensor, d: int, index: Tensor) -> DistTensor:
    """Return `x`, partitioned along `d` as `index` if that needs no messages, or `x` itself."""
    axes = index.cuts[d] if isinstance(index, DistTensor) else ()
    if x.cuts[d] or not axes or set(axes) & set(cutting_axes(x.cuts)) or _counts(x, d, index):
        return x
    cuts = replaced_at(x.cuts, d, axes)
    # A view of the shard; `redistribute` would copy the block.
    block = x.shard[box_on_rank(x.shape, replaced_at(((),) * x.dim(), d, axes), x.grid).slices]
    return DistTensor(block, x.shape, cuts, x.grid)


def _added_to_rows(x: DistTensor, d: int, index: Tensor, src: Tensor) -> DistTensor | None:
    """Return scatter_add of `x` along a partitioned dimension `d`, by a row exchange. Collective.

    Each rank sums the values of its block of `index`, and sends the sums to the ranks that hold the
    rows. Returns None on all ranks if dimension `d` should be gathered instead.
    """
    name = "scatter_add"
    if not x.cuts[d] or any(n != x.shape[i] for i, n in enumerate(index.shape) if i != d):
        return None
    # torch reads only as many values as there are indices.
    for i, n in enumerate(index.shape):
        src = src.narrow(i, 0, n) if src.shape[i] != n else src
    own = local_operand(index, tuple(index.shape), x.cuts, x.grid, name)
    rows = row_exchange(x, d, index, own, x.cuts, f"{name}, position", error=RuntimeError)
    if rows is None:
        return None
    return _sums_sent(torch.Tensor.scatter_add_, x, d, rows, src, name)


def _sums_sent(
    add: Callable[..., Tensor],
    x: DistTensor,
    d: int,
    rows: RowExchange,
    src: Tensor,
    name: str,
    **options: Any,
) -> DistTensor:
    """Return `x` plus the values `src`, summed by row along dimension `d`. Collective.

    Each rank sums its block of `src` with `add`, torch.Tensor.scatter_add_ or
    torch.Tensor.index_add_, and `options`, such as alpha. The row exchange `rows` sends the sums to
    the ranks that hold the rows. `name` is the called function, for records.
    """
    values = local_operand(src, tuple(src.shape), x.cuts, x.grid, name)
    zeros = values.new_zeros(replaced_at(tuple(x.shard.shape), d, len(rows.wanted)))
    summed = rows.add_up(add(zeros, d, rows.places, values, **options), d, x.cuts)
    del zeros, values
    return DistTensor(x.shard.index_add(d, rows.requests, summed), x.shape, x.cuts, x.grid)


def _counts(input: Tensor, d: int, index: Tensor) -> bool:
    """Return whether scatter_add should sum on each rank, followed by an all-reduce of the sums.

    True if `index` has more elements than `input`, is partitioned along dimension `d` or merged,
    and no other dimension is merged. Each rank sums the values for its own block of `index`.
    """
    return (
        isinstance(index, DistTensor)
        and index.numel() > input.numel()
        and bool(index.cuts[d] or is_merged(index))
        and all(len(run) == 1 for i, run in enumerate(factors_of(index)) if i != d)
    )


def _summed_over_ranks(input: Tensor, d: int, index: Tensor, src: Tensor, grid: Grid) -> DistTensor:
    """Return the sums that scatter_add adds to `input`, replicated on every rank. Collective.

    Each rank sums the values `src` for its block of `index`, and an all-reduce sums over the ranks.
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

    Each rank sums its block of `src`, and an all-reduce sums over the ranks. Returns NotImplemented
    without a change if `index` is no larger than `input`, is not partitioned along `dim`, or does
    not fit.
    """
    d = normalize_dim(dim, input.dim()) if input.dim() else 0
    if not input.dim() or input.dim() != index.dim() or not _counts(input, d, index):
        return NotImplemented
    grid = common_grid("scatter_add_", (index, src))
    return input.add_(gather_whole(_summed_over_ranks(input, d, index, src, grid), "scatter_add_"))


for _name in ("scatter", "scatter_add", "scatter_reduce"):
    implements_in_place(
        getattr(torch.Tensor, f"{_name}_"),
        RULES[getattr(torch, _name)],
        _count_into_plain if _name == "scatter_add" else None,
    )


@implements(F.one_hot)
def one_hot(tensor: DistTensor, num_classes: int = -1) -> DistTensor:
    """Return one-hot vectors along a new last dimension, which is not partitioned."""
    check_on_meta(F.one_hot, tensor, max(num_classes, 1))
    if num_classes < 0:
        num_classes = int(tensor.max().item()) + 1
    with in_range("one_hot, class number", tensor.shard, num_classes):
        shard = F.one_hot(tensor.shard, num_classes)
    return DistTensor(shard, (*tensor.shape, num_classes), (*tensor.cuts, ()), tensor.grid)


# Copies of tensors with positions overwritten or added to: index_add, select_scatter and so on.
#
# Each rank writes to its block. The new values are gathered along the indexed dimension first.


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
    """Return a copy with `src` on a diagonal, not partitioned along its dimensions. Collective."""
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
    """Return `input` as a DistTensor, `dim` from 0 on, and all of `index`, from 0 on. Collective.

    Negative numbers are converted; `index` is flattened and gathered on every rank. `others` are
    further operands, on the same grid. `name` is the called function, for errors.
    """
    x = as_distributed(input, common_grid(name, (input, index, *others)))
    if not x.dim():
        refuse(name, "the tensor has no dimensions", x, way_out="Use x.reshape(1)")
    d = normalize_dim(dim, x.dim())
    return x, d, _whole_places(name, index.reshape(-1), x.shape[d], f"dimension {d}")


def _whole_places(name: str, index: Tensor, n: int, among: str) -> Tensor:
    """Return all positions in `index` on every rank, with negative ones from the end. Collective.

    Raises on every rank for a position outside of `n` elements. For the error message, `name` is
    the called function, and `among` names the dimension or tensor with the `n` elements.
    """
    places = gather_whole(index, name)
    within = ((places >= -n) & (places < n)).all()
    assert_async(within, f"{name}: not all positions lie in {among}, of {n} elements")
    return wrap_negative(places, n)


def _placed(
    name: str, input: Tensor, dim: int, index: Tensor, source: Tensor, *reduce: str, **options: Any
) -> DistTensor:
    """Return the result of torch's index_add, index_copy or index_reduce. Collective.

    `name` is the name of the function. Each rank computes its block. `reduce` is the argument
    `reduce` of index_reduce, and empty for other functions.
    """
    function: Callable[..., Tensor] = getattr(torch, name)
    check_on_meta(function, input, dim, index, source, *reduce, **options)
    if name == "index_add":
        x = as_distributed(input, common_grid(name, (input, index, source)))
        added = _slices_added(x, dim, index, source, **options) if x.dim() else None
        if added is not None:
            return added
    x, d, places = _places(name, input, dim, index)
    return _written_at(function, x, d, [places], source, *reduce, **options)


def _slices_added(
    x: DistTensor, dim: int, index: Tensor, source: Tensor, alpha: Any = 1, name: str = "index_add"
) -> DistTensor | None:
    """Return index_add of `x` by sums of each rank's block of `source`. Collective.

    If dimension `dim` is partitioned, the sums are sent to the ranks that hold the rows. If not,
    and `source` is larger than `x`, an all-reduce sums over the ranks. Returns None on all ranks if
    `source` should be gathered along the dimension instead.
    """
    d = normalize_dim(dim, x.dim())
    positions = index.reshape(-1)
    if isinstance(source, DistTensor) and not x.cuts[d] and source.numel() > x.numel():
        axes = source.cuts[d]
        if axes and not set(axes) & set(cutting_axes(x.cuts)):
            cuts = replaced_at(x.cuts, d, axes)
            values = local_operand(source, tuple(source.shape), cuts, x.grid, name)
            places = _whole_places(name, positions, x.shape[d], f"dimension {d}")
            own = places[box_on_rank(places.shape, (axes,), x.grid).slices]
            sums = torch.zeros_like(x.shard).index_add(d, own, values, alpha=alpha)
            total = all_reduce_with_grad(sums, x.grid, axes)
            return DistTensor(x.shard + total, x.shape, x.cuts, x.grid)
    along = x.cuts[d : d + 1]
    own = local_operand(positions, tuple(positions.shape), along, x.grid, name)
    rows = row_exchange(x, d, index, own, along, f"{name}, position", wraps=True)
    if rows is None:
        return None
    return _sums_sent(torch.Tensor.index_add_, x, d, rows, source, name, alpha=alpha)


def _written_at(
    function: Callable[..., Tensor],
    x: DistTensor,
    first: int,
    places: Sequence[Tensor],
    source: Tensor,
    *reduce: str,
    **options: Any,
) -> DistTensor:
    """Return `function` of `x`, such as torch.index_add; each rank computes its block. Collective.

    Parameters
    ----------
    first: the first of the indexed dimensions.
    places: for each indexed dimension a vector of all positions, from 0 on, equal on all ranks.
    source: the values, (*dimensions before, positions, *dimensions after).
    """
    name, last = function.__name__, first + len(places)
    shape = (*x.shape[:first], len(places[0]), *x.shape[last:])
    cuts = (*x.cuts[:first], (), *x.cuts[last:])
    slices = local_operand(source, shape, cuts, x.grid, name)
    own = x.shard.shape[first:last]
    # Values for other blocks go to an extra slice, so that the host does not wait for their number.
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
    """Return the elements at positions of the flattened tensor, which is gathered. Collective."""
    grid = common_grid("take", (input, index))
    shape = check_on_meta(torch.take, input, index)
    places = as_distributed(index, grid)
    whole = gather_whole(input, "take")
    return DistTensor(whole.take(places.shard), shape, places.cuts, grid)


@implements(torch.put, torch.Tensor.put)
def put(input: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """Return a copy with `source` written or added at flattened positions `index`. Collective."""
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

    `indices` are positions or masks of the first dimensions of `input`. Each rank adds to its
    block. Raises RuntimeError if `values` have another type, and IndexError for indices that do not
    fit `input`.
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
    rows = values.expand(*picked, *rest).reshape(prod(picked), *rest)
    if len(found) == 1 and (added := _slices_added(x, 0, found[0], rows, name=name)) is not None:
        return added
    places = [
        _whole_places(name, item.expand(picked).reshape(-1), n, f"dimension {d}")
        for d, (item, n) in enumerate(zip(found, x.shape, strict=False))
    ]
    return _written_at(torch.index_add, x, 0, places, rows)


implements_in_place(Tensor.put_, put)
implements_in_place(Tensor.index_fill_, index_fill)
for _name in ("index_add", "index_copy", "index_reduce"):
    _rule = implements(getattr(torch, _name), getattr(Tensor, _name))(partial(_placed, _name))
    implements_in_place(getattr(Tensor, f"{_name}_"), _rule)
