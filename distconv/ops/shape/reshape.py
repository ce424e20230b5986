"""Reshapes, permutations and new dimensions of partitioned tensors.

If the first dimension of a run of flattened dimensions is partitioned, so is the first dimension of
the result. Nothing is sent if all blocks have equal lengths; otherwise neighbouring ranks exchange
parts of rows. If a partitioned dimension becomes an inner factor of a larger dimension, its blocks
are not contiguous in the result. The result is then a merged tensor: its blocks keep the shape
before the reshape until an operator needs the new blocks (`ops/support/merged.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distconv.geometry.index_maps import IndexMap, Rows, Same
from distconv.geometry.layout import Box, Cuts, Shape, factors_of_reshape, groups
from distconv.geometry.topology import Topology
from distconv.ops.support.arguments import (
    as_sizes,
    check_on_meta,
    normalize_dim,
    normalize_dims,
    takes_sequence,
)
from distconv.ops.support.merged import factors_of, places_of_factors
from distconv.ops.support.operands import box_on_rank, uncut
from distconv.tensor.aliasing import make_fork, make_view
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import gather_inputs, overwrite, redistribute


def _inferred(sizes: Shape, shape: Shape) -> Shape:
    """Return `sizes` with -1 replaced, as in torch.reshape of a tensor of `shape`."""
    return tuple(torch.empty(shape, device="meta").reshape(sizes).shape)


class _Regrouping(NamedTuple):
    """A reshape of adjacent dimensions whose blocks in the input and in the result differ.

    Blocks have unequal lengths, so neighbouring ranks exchange parts of rows.
    """

    old: range
    """The dimensions of the input."""
    into: int
    """The first of the dimensions of the result."""
    rows: Rows
    """The numbers of elements in a row of the input and in a row of the result."""

    def crop(self, buffer: Tensor, box: Box) -> Tensor:
        """Return the block `box` of the result from `buffer`, the gathered rows, flattened."""
        first = self.old.start
        start = self.rows.offset(box.start[self.into])
        length = self.rows.after * box.shape[self.into]
        return buffer.flatten(first, self.old.stop - 1).narrow(first, start, length)


def _reshaped_cuts(
    before: Shape, cuts: Cuts, after: Shape, topology: Topology
) -> tuple[Cuts, Cuts, list[_Regrouping]]:
    """Return the cuts to which to redistribute the input, the cuts of the result, and regroupings.

    `before` and `after` are the global shapes; cuts are the grid axes over which each dimension is
    partitioned. A run is a shortest series of adjacent dimensions of `before` with the same number
    of elements as adjacent dimensions of `after`, its result. An unchanged dimension keeps its
    axes. If the first dimension of a run is partitioned, the first dimension of its result is
    partitioned over all axes of the run; otherwise neither is partitioned. A run whose blocks have
    unequal lengths has a regrouping.
    """
    asked: list[tuple[str, ...]] = [()] * len(before)
    made: list[tuple[str, ...]] = [()] * len(after)
    uneven: list[_Regrouping] = []
    if 0 in before:
        return tuple(asked), tuple(made), uneven
    for old, new in groups(before, after):
        if not old or not new:
            continue
        # Dimensions of size 1 at the beginning of a run stay out of it.
        first = next((d for d in old if before[d] != 1), old[0])
        into = next((d for d in new if after[d] != 1), new[0])
        elements = prod(before[d] for d in old)
        if before[first] == after[into] == elements:
            asked[first] = made[into] = cuts[first]
        elif cuts[first]:
            asked[first] = made[into] = axes = tuple(axis for d in old for axis in cuts[d])
            parts = topology.parts(axes)
            if before[first] % parts or after[into] % parts:
                rows = Rows(elements // before[first], elements // after[into])
                uneven.append(_Regrouping(range(first, old.stop), into, rows))
    return tuple(asked), tuple(made), uneven


def _reshape_blocks(
    input: DistTensor, shape: Shape, operator: str, *, forks: bool = False
) -> DistTensor:
    """Return a view of `input` with the global shape `shape`, which is not merged. Collective.

    With `forks` return a fork (`make_fork`): serial torch returns a view or a copy, depending on
    strides. `operator` is the called function, for records of redistributions.
    """
    asked, made, uneven = _reshaped_cuts(tuple(input.shape), input.cuts, shape, input.grid.topology)
    box = box_on_rank(shape, made, input.grid)
    x = redistribute(input, asked, operator)
    buffer = x.shard
    if uneven:
        rows = {run.old.start: run.rows for run in uneven}
        needs: list[IndexMap] = [rows.get(d, Same()) for d in range(x.dim())]
        buffer = gather_inputs(x, needs, asked, operator)
        if 0 not in box.shape:
            # The last run first: the numbers of earlier dimensions do not change.
            for run in reversed(uneven):
                buffer = run.crop(buffer, box)
    block = buffer.reshape(box.shape)
    if forks:
        return make_fork(input, block, shape, made)

    def again(base: DistTensor) -> DistTensor:
        return _reshape_blocks(base, shape, operator)

    return make_view(input, block, shape, made, again, _write_reshaped)


def _write_reshaped(base: DistTensor, view: DistTensor) -> None:
    """Write the elements of `view`, a reshape of `base`, to `base`. Collective."""
    overwrite(base, _reshape(view, tuple(base.shape), "reshape"), "reshape")


@lru_cache(maxsize=4096)
def _stored_shape(before: Shape, cuts: Cuts, after: Shape, topology: Topology) -> Shape | None:
    """Return the shape under which to store a reshape of `before` to `after` as a merged tensor.

    A merged dimension of `after` is replaced by its factors, so that the tensor stays partitioned.
    Returns None if no partitioned dimension becomes an inner factor of a dimension of `after`, or
    if the two shapes have no common factors.
    """
    if not any(cuts) or 0 in before:
        return None
    runs = factors_of_reshape(before, after)
    if runs is None:
        return None
    _, made, _ = _reshaped_cuts(before, cuts, tuple(chain(*runs)), topology)
    of_factors = iter(made)
    shape: list[int] = []
    for run in runs:
        inner = any([next(of_factors) for _ in run][1:])
        shape += run if inner else (prod(run),)
    return tuple(shape) if len(shape) > len(after) else None


def _reshape(input: DistTensor, shape: Shape, operator: str, *, copied: bool = False) -> DistTensor:
    """Return `input` in the global shape `shape`. Collective.

    The result is merged if a partitioned dimension becomes an inner factor of a dimension.
    `copied` says that serial torch may return a copy instead of a view, depending on strides.
    `operator` is the called function, for records of redistributions.
    """
    before = tuple(input.shape)
    forks = copied and any(sum(before[d] != 1 for d in old) > 1 for old, _ in groups(before, shape))
    # The tensor before an earlier reshape, if `input` is merged.
    x = input.stored
    topology = x.grid.topology
    unmerged = _stored_shape(tuple(x.shape), x.cuts, shape, topology)
    if unmerged is None:
        return _reshape_blocks(x, shape, operator, forks=forks)
    if unmerged == tuple(x.shape):
        own = _alias(x, forks=forks)
    else:
        own = _reshape_blocks(x, unmerged, operator, forks=forks)
    _, made, _ = _reshaped_cuts(unmerged, own.cuts, shape, topology)

    def bring(base: DistTensor) -> DistTensor:
        return _reshape_blocks(base, shape, operator)

    return DistTensor.merging(own, shape, made, bring, _write_reshaped)


def _alias(x: DistTensor, *, forks: bool = False) -> DistTensor:
    """Return a view of all of `x`, with an autograd node; with `forks` return a fork."""
    shard = x.shard.view_as(x.shard)
    if forks:
        return make_fork(x, shard, x.shape, x.cuts)
    return make_view(x, shard, x.shape, x.cuts, _alias, place=...)


@implements(torch.reshape, torch.Tensor.reshape)
@takes_sequence("shape")
def reshape(input: DistTensor, *shape: Any) -> DistTensor:
    after = _inferred(as_sizes(shape), tuple(input.shape))
    return _reshape(input, after, "reshape", copied=True)


@implements(torch.Tensor.view)
@takes_sequence("size")
def view(input: DistTensor, *shape: Any, dtype: torch.dtype | None = None) -> DistTensor:
    """Return a view of `input` in another shape, or of its bits as another type. Collective."""
    kind = shape[0] if shape and isinstance(shape[0], torch.dtype) else dtype
    if kind is not None:
        return _bits_as(input, kind)
    return _reshape(input, _inferred(as_sizes(shape), tuple(input.shape)), "view")


def _bits_as(input: DistTensor, dtype: torch.dtype) -> DistTensor:
    """Return a view of the bits of `input` as elements of type `dtype`. Collective.

    If elements of the two types differ in size, or `input` is merged, the last dimension is
    gathered on every rank.
    """
    shape = check_on_meta(torch.Tensor.view, input, dtype)
    again = partial(_bits_as, dtype=dtype)
    if dtype.itemsize == input.dtype.itemsize and input.unmerged is None:
        return make_view(input, input.shard.view(dtype), shape, input.cuts, again)
    x = uncut(input, [input.dim() - 1], "view")

    def write(base: DistTensor, view: DistTensor) -> None:
        overwrite(base, _bits_as(view, base.dtype), "view")

    return make_view(input, x.shard.contiguous().view(dtype), shape, x.cuts, again, write)


@implements(torch.flatten, torch.Tensor.flatten)
def flatten(input: DistTensor, start_dim: int = 0, end_dim: int = -1) -> DistTensor:
    shape = torch.empty(tuple(input.shape), device="meta").flatten(start_dim, end_dim).shape
    return _reshape(input, tuple(shape), "flatten", copied=True)


@implements(torch.unflatten, torch.Tensor.unflatten)
def unflatten(input: DistTensor, dim: int, sizes: Sequence[int]) -> DistTensor:
    shape = torch.empty(tuple(input.shape), device="meta").unflatten(dim, sizes).shape
    return _reshape(input, tuple(shape), "unflatten")


@implements(torch.squeeze, torch.Tensor.squeeze)
def squeeze(input: DistTensor, dim: int | Sequence[int] | None = None) -> DistTensor:
    named = () if isinstance(dim, Sequence) and not dim else normalize_dims(dim, input.dim())
    gone = [d for d in named if input.shape[d] == 1]
    if input.unmerged is not None:
        return _reshape(
            input, tuple(n for d, n in enumerate(input.shape) if d not in gone), "squeeze"
        )
    x = uncut(input, gone, "squeeze")
    kept = [d for d in range(x.dim()) if d not in gone]
    shard = x.shard.squeeze(tuple(gone)) if gone else x.shard
    shape, cuts = [x.shape[d] for d in kept], tuple(x.cuts[d] for d in kept)
    write = None if x is input else _write_reshaped
    return make_view(input, shard, shape, cuts, lambda base: squeeze(base, gone), write)


@implements(torch.unsqueeze, torch.Tensor.unsqueeze)
def unsqueeze(input: DistTensor, dim: int) -> DistTensor:
    """Return a view of `input` with a new dimension `dim` of one element."""
    d = normalize_dim(dim, input.dim() + 1)
    if input.unmerged is not None:
        return _reshape(input, (*input.shape[:d], 1, *input.shape[d:]), "unsqueeze")
    shape, cuts = list(input.shape), list(input.cuts)
    shape.insert(d, 1)
    cuts.insert(d, ())
    shard = input.shard.unsqueeze(d)
    return make_view(input, shard, shape, tuple(cuts), lambda base: unsqueeze(base, d))


@implements(torch.permute, torch.Tensor.permute)
@takes_sequence("dims")
def permute(input: DistTensor, *dims: Any) -> DistTensor:
    """Return a view of `input` with its dimensions, each partitioned as before, in order `dims`."""
    named = as_sizes(dims)
    if len(named) != input.dim():
        raise RuntimeError(
            f"permute: {named} does not name all {input.dim()} dimensions; name each dimension once"
        )
    order = normalize_dims(named, input.dim())
    if input.unmerged is not None:
        places = places_of_factors(input)
        moved = permute(input.unmerged, [i for d in order for i in places[d]])
        return _reshape(moved, tuple(input.shape[d] for d in order), "permute")
    shape, cuts = [input.shape[d] for d in order], tuple(input.cuts[d] for d in order)
    shard = input.shard.permute(order)
    return make_view(input, shard, shape, cuts, lambda base: permute(base, order))


@implements(torch.transpose, torch.Tensor.transpose)
def transpose(input: DistTensor, dim0: int, dim1: int) -> DistTensor:
    numbered = torch.empty(tuple(range(input.dim())), device="meta")
    return permute(input, tuple(numbered.transpose(dim0, dim1).shape))


@implements(torch.Tensor.expand)
@takes_sequence("size")
def expand(input: DistTensor, *sizes: Any) -> DistTensor:
    """Return a view with dimensions of one element, or new ones in front, repeated. Collective."""
    shape = tuple(torch.empty(tuple(input.shape), device="meta").expand(as_sizes(sizes)).shape)
    lead = len(shape) - input.dim()
    if input.unmerged is not None:
        # A merged dimension has more than one element, so it is not repeated.
        runs = zip(factors_of(input), shape[lead:], strict=True)
        factors = chain.from_iterable(run if len(run) > 1 else (n,) for run, n in runs)
        return _reshape(expand(input.unmerged, (*shape[:lead], *factors)), shape, "expand")
    grown = [d for d in range(input.dim()) if input.shape[d] != shape[d + lead]]
    x = uncut(input, grown, "expand")
    cuts = ((),) * lead + x.cuts
    shard = x.shard.expand(box_on_rank(shape, cuts, x.grid).shape)
    return make_view(
        input,
        shard,
        shape,
        cuts,
        lambda base: expand(base, shape),
        None if x is input else _write_reshaped,
        writable=not grown and not any(n > 1 for n in shape[:lead]),
    )
