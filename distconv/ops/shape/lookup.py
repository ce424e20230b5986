"""Elements at positions in tensors, as in index_select, and elements picked by masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.comm import transfer
from distconv.comm.ledger import Movement, record
from distconv.geometry.layout import (
    Box,
    Cuts,
    Layout,
    Shape,
    cuts_of_broadcast,
    cutting_axes,
    rank_box,
    replaced_at,
)
from distconv.geometry.requested import concatenation
from distconv.grid.interface import Grid
from distconv.ops.shape.rows import check_range, row_exchange
from distconv.ops.support.arguments import check_on_meta, in_range, normalize_dim
from distconv.ops.support.dimensions import gathers_along, keeps_shape, picks_in_order
from distconv.ops.support.operands import (
    as_distributed,
    broadcast_shape,
    common_grid,
    empty_block,
    gather_whole,
    local_operand,
    uncut,
    unravel,
)
from distconv.tensor.aliasing import update_views
from distconv.tensor.dispatch import implements, refuse
from distconv.tensor.dist_tensor import DistTensor

# Elements at positions given by tensors along one dimension.
#
# The result is partitioned as the input, or as the tensor of positions if the input is replicated.
# If the dimension of the positions is partitioned, a rank receives the rows at its positions
# (`rows.py`), or all rows if the tensor is small. All ranks raise for a position out of range. Only
# where `index_select` or `embedding` gathers all rows, the rank with the position raises alone.


def wrap_negative(index: Tensor, size: int) -> Tensor:
    """Return `index` with `size` added to each negative position, as Python counts positions."""
    counted: Tensor = index + size * (index < 0)
    return counted


@implements(torch.index_select, torch.Tensor.index_select)
def index_select(input: Tensor, dim: int, index: Tensor) -> DistTensor:
    return selected(input, dim, index)


def selected(input: Tensor, dim: int, index: Tensor, wraps: bool = False) -> DistTensor:
    """Return the slices of `input` at positions `index`, as torch.index_select. Collective.

    If `wraps`, negative positions are counted from the end.
    """
    grid = common_grid("index_select", (input, index))
    x = as_distributed(input, grid)
    if index.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"index_select: an index of {index.dtype}; expected int32 or int64")
    if index.dim() > 1:
        raise IndexError(
            f"index_select: an index of shape {tuple(index.shape)} is not a vector; expected one "
            "dimension"
        )
    shape = check_on_meta(torch.index_select, input, dim, index)
    if not x.dim():
        refuse("index_select", "the tensor has no dimensions", x, way_out="Use x.reshape(1)")
    d = normalize_dim(dim, x.dim())
    vector = index if index.dim() else index.reshape(1)
    own = local_operand(vector, shape[d : d + 1], x.cuts[d : d + 1], grid, "index_select")
    rows = row_exchange(x, d, index, own, x.cuts[d : d + 1], "index_select, position", wraps=wraps)
    if rows is not None:
        shard = rows.fetch(x.shard, d, x.cuts).index_select(d, rows.places)
        return DistTensor(shard, shape, x.cuts, grid)
    whole = uncut(x, [d], "index_select").shard
    own = wrap_negative(own, x.shape[d]) if wraps else own
    with in_range("index_select, position", own, x.shape[d]):
        shard = whole.index_select(d, own)
    return DistTensor(shard, shape, x.cuts, grid)


@keeps_shape
def rows_at(index: DistTensor, table: DistTensor) -> DistTensor:
    """Return `table[index]`, partitioned as `index`, for a `table` that is not partitioned."""
    own = wrap_negative(index.shard, len(table))
    with in_range("indexing, position", own, len(table)):
        shard = table.shard[own]
    shape = *index.shape, *table.shape[1:]
    return DistTensor(shard, shape, (*index.cuts, *table.cuts[1:]), index.grid)


@implements(torch.gather, torch.Tensor.gather)
def gather(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> DistTensor:
    grid = common_grid("gather", (input, index))
    x = as_distributed(input, grid)
    check_on_meta(torch.gather, input, dim, index)
    if sparse_grad or not x.dim() or x.dim() != index.dim():
        what = "sparse_grad" if sparse_grad else f"{x.dim()} dimensions for {index.dim()} of index"
        refuse("gather", f"{what} is not supported", x, index, way_out="Use x.full_tensor()")
    d = normalize_dim(dim, x.dim())
    return _gathered(x, index, d)


@gathers_along
def _gathered(x: DistTensor, index: Tensor, d: int) -> DistTensor:
    """Return torch.gather(x, d, index), without checks of shapes and types. Collective."""
    shape, grid = tuple(index.shape), x.grid
    # Where the index is shorter than the input, their blocks have different positions.
    shorter = [i for i, n in enumerate(shape) if i != d and n != x.shape[i]]
    cuts = [() if i in shorter else axes for i, axes in enumerate(x.cuts)]
    # Along other dimensions of the input, the result is partitioned as the index.
    for i, axes in enumerate(as_distributed(index, grid).cuts):
        if not cuts[i] and i not in shorter and not set(axes) & set(cutting_axes(cuts)):
            cuts[i] = axes
    own = local_operand(index, shape, tuple(cuts), grid, "gather")
    if not shorter:
        among = tuple(cuts)
        block = local_operand(x, tuple(x.shape), among, grid, "gather")
        table = DistTensor(block, x.shape, among, grid)
        rows = row_exchange(table, d, index, own, among, "gather, position", error=RuntimeError)
        if rows is not None:
            shard = rows.fetch(block, d, among).gather(d, rows.places)
            return DistTensor(shard, shape, among, grid)
    table = uncut(x, [d, *shorter], "gather")
    along = replaced_at(tuple(cuts), d, ())
    here = local_operand(table, tuple(x.shape), along, grid, "gather")
    check_range(own, x.shape[d], x, tuple(cuts), "gather, position")
    with in_range("gather, position", own, x.shape[d]):
        shard = here.gather(d, own)
    return DistTensor(shard, shape, tuple(cuts), grid)


@implements(torch.take_along_dim, torch.Tensor.take_along_dim)
def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> DistTensor:
    """Return the elements at `indices` along `dim`; other dimensions are broadcast. Collective."""
    if indices.dtype != torch.int64:
        raise RuntimeError(
            f"take_along_dim: indices of {indices.dtype}; expected int64, for example "
            "indices.long()"
        )
    if dim is None:
        return gather(input.flatten(), 0, indices.flatten())
    if input.dim() != indices.dim():
        raise RuntimeError(
            f"take_along_dim: input {tuple(input.shape)} and indices {tuple(indices.shape)} must "
            "have the same number of dimensions"
        )
    if not input.dim():
        refuse("take_along_dim", "there are no dimensions", input, way_out="Use x.reshape(1)")
    d = normalize_dim(dim, input.dim())
    shapes = [torch.Size((*t.shape[:d], 1, *t.shape[d + 1 :])) for t in (input, indices)]
    rest = torch.broadcast_shapes(*shapes)
    x, index = (t.expand(*rest[:d], t.shape[d], *rest[d + 1 :]) for t in (input, indices))
    # torch takes the remainder here, while gather raises for positions out of range.
    return gather(x, d, index.remainder(max(x.shape[d], 1)))


@implements(F.embedding)
@keeps_shape
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> DistTensor:
    """Return the rows of `weight` at the positions `input`, partitioned as `input`. Collective."""
    grid = common_grid("embedding", (input, weight))
    if max_norm is not None or scale_grad_by_freq or sparse:
        reason = "max_norm, scale_grad_by_freq and sparse are not supported"
        refuse("embedding", reason, input, weight, way_out="Leave them out")
    if input.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"embedding: positions of {input.dtype}; expected int32 or int64")
    shape = check_on_meta(F.embedding, input, weight, padding_idx)
    x = as_distributed(input, grid)
    own, rows = x.shard, None
    if isinstance(weight, DistTensor):
        held = uncut(weight, [1], "embedding")
        rows = row_exchange(held, 0, input, own, x.cuts, "embedding, position")
    if rows is not None:
        table, own = rows.fetch(held.shard, 0, held.cuts), rows.places
        padding_idx = _place_of(padding_idx, len(weight), rows.wanted)
    else:
        table = gather_whole(weight, "embedding")
    if input.numel() and not own.numel():
        # Without positions torch cannot differentiate its gradient.
        shard = empty_block(table, (*x.shard.shape, table.shape[1]))
    else:
        with in_range("embedding, position", own, len(table)):
            shard = F.embedding(own, table, padding_idx)
    return DistTensor(shard, shape, (*x.cuts, ()), grid)


def _place_of(row: int | None, size: int, wanted: Tensor) -> int | None:
    """Return the index at which `wanted` has row number `row`, modulo `size`; None if nowhere."""
    if row is None:
        return None
    places = (wanted == row % size).nonzero()
    return int(places) if len(places) else None


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


# Elements that masks pick on all ranks, gathered on all ranks in the serial order.
#
# Let `last` be the last partitioned dimension. For each position along dimensions 0 to `last` - 1,
# the elements of a block are consecutive in row-major order of the global tensor: a run. The ranks
# exchange the number of picked elements of each run, and then only the picked elements.


class Selection:
    """The elements that a distributed mask picks, numbered in the row-major order of serial torch.

    All ranks of the grid create a selection together, to read or write the picked elements.
    `operator` is the called function, for records.

    Attributes
    ----------
    here: this rank's block of the mask.
    total: the number of elements picked on all ranks.
    """

    def __init__(self, mask: DistTensor, operator: str):
        self.here, self._operator = mask.shard, operator
        self._cuts, self._grid = mask.cuts, mask.grid
        axes = cutting_axes(mask.cuts)
        self._peers = mask.grid.topology.peers(mask.grid.rank, axes)
        self._own = self._peers.index(mask.grid.rank)
        if not axes:
            self.total = int(self.here.sum())
            self._lengths, self._places = [self.total], None
            return
        shape = tuple(mask.shape)
        boxes = [rank_box(shape, mask.cuts, mask.grid.topology, peer) for peer in self._peers]
        last = max(d for d, cut in enumerate(mask.cuts) if cut)
        keys = [_runs(shape, box, last, self.here.device) for box in boxes]
        lengths = [len(run) for run in keys]
        mine = self.here.reshape(lengths[self._own], -1) if self.here.numel() else self.here
        counted = (
            mine.sum(1) if self.here.numel() else keys[self._own].new_zeros(len(keys[self._own]))
        )
        counts = self._moved(counted, lengths, ())
        self._lengths = [
            int(n) for n in torch.stack([c.sum() for c in counts.split(lengths)]).tolist()
        ]
        self.total = sum(self._lengths)
        self._places = _in_order(torch.cat(keys), counts)

    @property
    def places(self) -> Tensor:
        """Return the numbers of this rank's picked elements, counted over all ranks from 0 on."""
        if self._places is None:
            return torch.arange(self.total, device=self.here.device)
        return self._places.split(self._lengths)[self._own]

    def bring(self, rows: Tensor, cuts: Cuts = ()) -> Tensor:
        """Return the `rows` of all ranks on every rank, in row-major order. Collective.

        Parameters
        ----------
        rows: one row for each element that is picked on this rank, in row-major order.
        cuts: the cuts of the dimensions of a row.
        """
        if self._places is None:
            return rows
        arrived = self._moved(rows, self._lengths, cuts)
        order = torch.empty_like(self._places)
        order[self._places] = torch.arange(self.total, device=order.device)
        return arrived[order]

    def _moved(self, rows: Tensor, lengths: list[int], cuts: Cuts) -> Tensor:
        plan = concatenation(lengths, self._peers, self._grid.rank, tuple(rows.shape[1:]))
        layouts = Layout.of((*self._cuts, *cuts)), Layout.of(((), *cuts))
        record(Movement(self._operator, *layouts, plan, rows.element_size()))
        return transfer.gather(rows, plan, self._grid)


def _runs(shape: Shape, box: Box, last: int, device: torch.device) -> Tensor:
    """Return the row-major number, in dimensions 0 to `last`, at which each run of a block starts.

    `shape` is the global shape, `box` the block, and `last` the last partitioned dimension. A run
    has the elements of the block at one position of dimensions 0 to `last` - 1.
    """
    keys = torch.zeros((), dtype=torch.int64, device=device)
    for n, start, stop in zip(shape[:last], box.start, box.stop, strict=False):
        keys = keys.unsqueeze(-1) * n + torch.arange(start, stop, device=device)
    return keys.reshape(-1) * shape[last] + box.start[last]


def _in_order(keys: Tensor, counts: Tensor) -> Tensor:
    """Return for each element its place after the runs of elements are sorted by key.

    Run i has `counts[i]` elements and the sort key `keys[i]`; elements are listed run after run.
    """
    order = keys.argsort()
    starts = torch.empty_like(counts)
    starts[order] = counts[order].cumsum(0) - counts[order]
    shift = starts - (counts.cumsum(0) - counts)
    elements = shift.repeat_interleave(counts)
    return elements + torch.arange(len(elements), device=keys.device)


# Reading and writing the elements that a mask picks.
#
# Each rank picks elements of its own block. Elements that are read are gathered on every rank, as
# their number is a global size. To write elements, ranks exchange at most the numbers of picked
# elements, besides a distributed mask or value.


def picked_by_mask(input: Tensor, mask: Tensor, operator: str) -> DistTensor:
    """Return the rows of `input` where `mask`, over its leading dimensions, is true.

    The result is (rows, *other dimensions), with all rows on every rank. Collective. `operator` is
    the called function, for errors and records.
    """
    check_mask(mask, tuple(input.shape[: mask.dim()]), input)
    return _picked(input, mask, common_grid(operator, (input, mask)), operator)


@picks_in_order
def _picked(input: Tensor, mask: Tensor, grid: Grid, operator: str) -> DistTensor:
    """Return the rows of `input` where `mask` is true, on every rank; no checks. Collective."""
    x, chosen = as_distributed(input, grid), as_distributed(mask, grid)
    behind = x.dim() - chosen.dim()
    shape = tuple(x.shape)
    cuts = cuts_of_broadcast(
        ((shape, x.cuts), ((*chosen.shape, *(1,) * behind), (*chosen.cuts, *((),) * behind))), shape
    )
    over, along = cuts[: chosen.dim()], cuts[chosen.dim() :]
    here = local_operand(chosen, shape[: chosen.dim()], over, grid, operator)
    selection = Selection(DistTensor(here, chosen.shape, over, grid), operator)
    rows = selection.bring(local_operand(x, shape, cuts, grid, operator)[here], along)
    return DistTensor(rows, (selection.total, *shape[chosen.dim() :]), ((), *along), grid)


def assign_by_mask(input: DistTensor, first: int, mask: Tensor, value: Tensor) -> None:
    """Assign `value` to `input` where `mask` is true; each rank writes to its block. Collective.

    The dimensions of `mask` are dimensions `first`, `first` + 1, ... of `input`. `value` is
    broadcast to (*dimensions before, picked elements in row-major order, *dimensions after).
    Raises IndexError if the shape of `mask` does not match, and RuntimeError if `value` does not
    broadcast or has another type than `input`.
    """
    operator = "assignment"
    stop = first + mask.dim()
    over = tuple(input.shape[first:stop]), input.cuts[first:stop]
    check_mask(mask, over[0], input)
    grid = common_grid(operator, (input, mask, value))
    behind = input.dim() - stop
    while value.dim() > first + 1 + behind and value.shape[0] == 1:
        value = value.squeeze(0)
    of_each = value.dim() > behind and value.shape[-1 - behind] != 1
    if value.dtype != input.dtype and value.numel() != 1:
        raise RuntimeError(
            f"{operator}: {value.dtype} values for a tensor of {input.dtype}; convert them"
        )
    here = local_operand(mask, *over, grid, operator)
    selection = None
    number = 1
    if of_each:
        selection = Selection(DistTensor(here, *over, grid), operator)
        number = selection.total
    shape = (*input.shape[:first], number, *input.shape[stop:])
    cuts = (*input.cuts[:first], (), *input.cuts[stop:])
    sizes = zip(value.shape[::-1], shape[::-1], strict=False)
    if value.dim() > len(shape) or any(n not in (1, m) for n, m in sizes):
        raise RuntimeError(
            f"{operator}: values {tuple(value.shape)} cannot be broadcast to the selected "
            f"elements, {shape}"
        )
    own = local_operand(value, shape, cuts, grid, operator)
    if selection is not None:
        own = own.index_select(own.dim() - 1 - behind, selection.places)
    input.shard[(*(slice(None),) * first, here)] = own
    update_views(input)


def check_mask(mask: Tensor, shape: Shape, input: Tensor) -> None:
    """Raise IndexError unless `mask` has `shape`, that of the dimensions of `input` to index."""
    if tuple(mask.shape) != shape:
        raise IndexError(
            f"the mask of shape {tuple(mask.shape)} does not match the dimensions {shape} of the "
            f"tensor of shape {tuple(input.shape)}"
        )


@implements(torch.masked_select, torch.Tensor.masked_select)
def masked_select(input: Tensor, mask: Tensor) -> DistTensor:
    if mask.dtype != torch.bool:
        raise RuntimeError(f"masked_select: a mask of {mask.dtype}; expected torch.bool")
    shape = broadcast_shape("masked_select", (input, mask))
    return picked_by_mask(input.expand(shape), mask.expand(shape), "masked_select")


def positions(input: DistTensor, operator: str) -> DistTensor:
    """Return the global positions of the nonzero elements of `input`, on every rank. Collective.

    The result has shape (elements, dimensions). `operator` is the called function, for records.
    """
    x = input.stored
    chosen = x.shard != 0
    if not input.dim():
        return as_distributed(chosen.nonzero(), x.grid)
    selection = Selection(DistTensor(chosen, x.shape, x.cuts, x.grid), operator)
    start = torch.tensor(x.box.start, dtype=torch.int64, device=x.device)
    # `x` may be `input` before a reshape, which keeps the row-major numbers of elements.
    numbers: Any = 0
    for size, column in zip(x.shape, (chosen.nonzero() + start).unbind(1), strict=True):
        numbers = numbers * size + column
    return as_distributed(torch.stack(unravel(selection.bring(numbers), input.shape), 1), x.grid)


def _positions(function: Callable[..., Any]) -> None:
    @implements(function)
    def rule(input: DistTensor, *, as_tuple: bool = False) -> Any:
        found = positions(input, "nonzero")
        if not as_tuple:
            return found
        if not input.dim():  # torch treats it as a vector
            return (as_distributed(found.shard.new_zeros(len(found)), input.grid),)
        return found.unbind(1)


for _home in (torch, torch.Tensor):
    for _name in ("argwhere", "nonzero"):
        _positions(getattr(_home, _name))
