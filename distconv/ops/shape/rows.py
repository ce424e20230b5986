"""Row exchange: each rank receives the rows of a partitioned dimension at its positions.

A row is the slice at one position of that dimension. The ranks exchange the number of rows that
each requests, then the indices of the rows, and then the rows. The indices are kept while the
tensor of positions exists and is not written to, so a mesh or graph with constant connectivity
sends its indices once. Ranks may have dropped different tensors, so in each call the ranks compare
the numbers of their kept decisions.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from distconv.comm.collectives import all_gather
from distconv.comm.ledger import Movement, record
from distconv.comm.transfer import accumulate, gather
from distconv.device.kinds import is_accelerator, thresholds
from distconv.geometry.layout import Axes, Cuts, Layout, cutting_axes, rank_box, replaced_at
from distconv.geometry.plan import Plan
from distconv.geometry.requested import rows_plan
from distconv.geometry.topology import AXES
from distconv.grid.interface import Grid
from distconv.ops.support.arguments import out_of_range
from distconv.ops.support.operands import constant, may_read
from distconv.tensor.dist_tensor import DistTensor
from distconv.torch_private import base_of

MOST_KEPT = 32
"""The largest number of row exchanges kept for one tensor of positions."""

MOST_MOVED = 0.75
"""The largest fraction of all rows that a rank may receive in a row exchange.

Indices of rows count by their bytes. Above this fraction every rank gathers all rows."""

_KEPT = WeakTensorKeyDictionary()
"""For each tensor of positions, the number of writes to the tensor, and the kept decisions."""

_latest = 0
"""The number of the latest decision of this rank and its peers."""


class RowExchange(NamedTuple):
    """A row exchange along one partitioned dimension, from the view of one rank.

    Attributes
    ----------
    ranks: the ranks that hold rows, in the order of their blocks.
    places: for each position on this rank, the index of its row in the result of `fetch`.
    wanted: the global numbers of the rows that `fetch` returns, ascending.
    asked: the number of rows that this rank receives from each of `ranks`.
    requests: the rows of this rank's block to send, counted from its first row, rank by rank.
    requested: the number of rows that this rank sends to each of `ranks`.
    plans: the message plans, by the shape of a row and the dimension.
    """

    operator: str
    grid: Grid
    ranks: tuple[int, ...]
    places: Tensor
    wanted: Tensor
    asked: tuple[int, ...]
    requests: Tensor
    requested: tuple[int, ...]
    plans: dict[Any, Plan]

    def fetch(self, block: Tensor, d: int, cuts: Cuts) -> Tensor:
        """Return the rows along dimension `d` that this rank has requested. Collective.

        `block` is this rank's block of a tensor, and `cuts` are the tensor's cuts, for the ledger.
        Differentiable.
        """
        plan = self._plan(block, d, cuts, adjoint=False)
        return gather(block.index_select(d, self.requests), plan, self.grid)

    def add_up(self, rows: Tensor, d: int, cuts: Cuts) -> Tensor:
        """Return the sums over the ranks of `rows`, for the rows `requests` of a block. Collective.

        `rows` has a row of values for each row number in `wanted`. Each is sent to its holder: the
        adjoint of the exchange in `fetch`. Differentiable.
        """
        plan = self._plan(rows, d, cuts, adjoint=True)
        return accumulate(rows, plan, self.grid)

    def _plan(self, block: Tensor, d: int, cuts: Cuts, adjoint: bool) -> Plan:
        row = replaced_at(tuple(block.shape), d, 0)
        plan = self.plans.get((row, d))
        if plan is None:
            moved = self.requested, self.asked, self.ranks
            plan = self.plans[row, d] = rows_plan(*moved, self.grid.rank, row, d)
        layouts = Layout.of(cuts), Layout.of(replaced_at(cuts, d, ()))
        record(Movement(self.operator, *layouts, plan, block.element_size(), adjoint))
        return plan


class _RequestedRows(NamedTuple):
    """The rows that this rank requests; `wanted` and `places` are those of `RowExchange`.

    `message` is a vector of integers for the other ranks: 1 if a position is out of range, that
    position, and the number of rows requested from each holder of rows.
    """

    wanted: Tensor
    places: Tensor
    message: Tensor


class _Decision(NamedTuple):
    """A kept decision, common to ranks, on how to get the rows at some positions.

    Attributes
    ----------
    number: the number of the decision, the same on the ranks that have taken it.
    asked: the requested rows; None if all rows were gathered without looking at the positions.
    exchange: the row exchange; None to gather all rows.
    lent: a copy of this rank's positions if NumPy shares their memory, as torch does not count
        NumPy's writes; else None.
    """

    number: int
    asked: _RequestedRows | None
    exchange: RowExchange | None
    lent: Tensor | None


def row_exchange(
    x: DistTensor,
    d: int,
    positions: Tensor,
    own: Tensor,
    among: Cuts,
    operator: str,
    *,
    wraps: bool = False,
    error: type[Exception] = IndexError,
) -> RowExchange | None:
    """Return a row exchange of `x` along dimension `d` for the rows at `positions`. Collective.

    Returns None on all ranks if all rows should be gathered, because

    - dimension `d` is not partitioned;
    - no elements may be read, as in a dry run or while a program is traced (`may_read`);
    - `x` is small, and `positions` are a DistTensor or are used for the first time; or
    - a rank would receive more than `MOST_MOVED` of the rows from other ranks.

    Parameters
    ----------
    positions: the tensor of positions that the program passes.
    own: this rank's block of `positions`.
    among: the cuts of `positions`: the grid axes over which each dimension is partitioned.
    operator: the called function, for errors and records.
    wraps: whether negative positions are counted from the end.
    error: the type raised on every rank if a position is out of range.
    """
    grid, size, axes = x.grid, x.shape[d], x.cuts[d]
    plain, few = not isinstance(positions, DistTensor), _is_small(x, d)
    if not axes or not may_read(x) or (few and not plain):
        return None
    memory = own.storage_offset(), own.shape, own.stride()
    row = _size_of_row(x, d), x.shard.element_size()
    key = memory, positions.shape, size, axes, grid, row, among, operator, wraps
    kept = _kept(own)
    known: _Decision | None = kept.get(key)
    lent = not own.untyped_storage().resizable()
    if lent and known is not None and (known.lent is None or not torch.equal(known.lent, own)):
        known = None
    every = tuple(dict.fromkeys((*axes, *cutting_axes(among))))
    number, again = _next_decision(known, grid, every, own.device)
    if known is not None and known.asked is not None and again:
        return known.exchange
    copy = own.clone() if lent else None
    if few and not again:
        kept[key] = _Decision(number, None, None, copy)
        return None
    asked = None if known is None else known.asked
    with torch.inference_mode(False):
        ranks = _holders(axes, grid)
        asked = asked or _ask(own, size, ranks, axes, grid, wraps)
        counts = _gathered_counts(asked, size, grid, every, operator, error)
        less = _moves_less(counts, x, d)
        made = _exchange(asked, counts, ranks, x, d, operator) if less else None
        kept[key] = _Decision(number, asked, made, copy)
    return made


def _next_decision(
    known: _Decision | None, grid: Grid, axes: Axes, device: torch.device
) -> tuple[int, bool]:
    """Return the number of the next decision, and whether all ranks keep the same decision.

    `known` is the decision that this rank keeps, or None. Collective over `axes`. A rank may have
    kept a decision while another rank has a new tensor of positions.
    """
    global _latest
    mine = torch.tensor([0 if known is None else known.number, _latest], device=device)
    numbers, latest = all_gather(mine, grid, axes).T.tolist()
    _latest = max(latest) + 1
    return _latest, numbers[0] > 0 and len(set(numbers)) == 1


def _peers(grid: Grid, axes: Axes) -> tuple[int, ...]:
    return grid.topology.peers(grid.rank, axes)


def _kept(own: Tensor) -> dict[Any, _Decision]:
    """Return the decisions kept for the memory of `own`, to look up or add; none after a write."""
    if own.is_inference():
        return {}
    base = base_of(own)
    root = own if base is None else base
    version, kept = _KEPT.get(root, (None, {}))
    if version != root._version or len(kept) >= MOST_KEPT:
        kept = {}
        _KEPT[root] = root._version, kept
    return kept


def _size_of_row(x: DistTensor, d: int) -> int:
    """Return the number of elements in a row of rank 0's block along `d`, the largest of all."""
    largest = rank_box(tuple(x.shape), x.cuts, x.grid.topology, 0)
    return prod(replaced_at(largest.shape, d, 1))


def _is_small(x: DistTensor, d: int) -> bool:
    """Return whether gathering all rows of `x` takes less time than a row exchange, by its size."""
    return _size_of_row(x, d) * x.shape[d] <= thresholds(x.grid.computes_on_gpu).gathered_rows


def _moves_less(counts: dict[int, list[int]], x: DistTensor, d: int) -> bool:
    """Return whether in a row exchange each rank receives at most `MOST_MOVED` of the rows of `x`.

    Rows that the rank holds itself do not count; the indices that are sent do, by their bytes.
    `counts` has for each rank the number of rows that it requests from each holder of rows.
    """
    topology = x.grid.topology
    moved = max(
        sum(asked) - asked[topology.part(topology.coordinates(rank), x.cuts[d])]
        for rank, asked in counts.items()
    )
    bytes_of_row = max(_size_of_row(x, d), 1) * x.shard.element_size()
    bytes_of_index = _index_type(x.shape[d]).itemsize
    return moved * (1 + bytes_of_index / bytes_of_row) <= MOST_MOVED * x.shape[d]


def _holders(axes: Axes, grid: Grid) -> tuple[int, ...]:
    """Return the ranks that hold the blocks of a dimension partitioned over `axes`, in order."""
    topology = grid.topology
    return tuple(
        sorted(_peers(grid, axes), key=lambda r: topology.part(topology.coordinates(r), axes))
    )


def _start(size: int, axes: Axes, grid: Grid, rank: int) -> int:
    return rank_box((size,), (axes,), grid.topology, rank).start[0]


def _ask(
    own: Tensor, size: int, ranks: tuple[int, ...], axes: Axes, grid: Grid, wraps: bool
) -> _RequestedRows:
    # Of positions expanded over channels, for example, only those of one channel are sorted.
    rows = own[tuple(slice(None) if step else slice(1) for step in own.stride())].long()
    if wraps:
        rows = rows + size * (rows < 0)
    wanted, places = torch.unique(rows, return_inverse=True)
    places = places.expand(own.shape)
    outside = (wanted < 0) | (wanted >= size)
    wrong = outside.any()
    edges = constant(own.device, (*(_start(size, axes, grid, r) for r in ranks), size))
    position = torch.where(outside, wanted, 0)
    position = position[position.abs().argmax()] if len(wanted) else wrong
    counts = torch.searchsorted(wanted, edges).diff()
    wanted = wanted.to(_index_type(size))
    return _RequestedRows(
        wanted, places, torch.cat([torch.stack([wrong.long(), position.long()]), counts])
    )


def _index_type(size: int) -> torch.dtype:
    """Return the integer type for the numbers of `size` rows, in messages and in memory."""
    return torch.int32 if size <= torch.iinfo(torch.int32).max else torch.int64


def _gathered_counts(
    asked: _RequestedRows, size: int, grid: Grid, axes: Axes, operator: str, error: type[Exception]
) -> dict[int, list[int]]:
    """Return for each rank the numbers of rows that it requests from each holder of rows.

    `asked` are the rows that this rank requests, of `size` rows. Collective over `axes`. Raises
    `error` on every rank if a position on one of the ranks is out of range.
    """
    told = all_gather(asked.message, grid, axes).tolist()
    for wrong, position, *_ in told:
        if wrong:
            raise error(out_of_range(operator, position, size))
    return {rank: row[2:] for rank, row in zip(_peers(grid, axes), told, strict=True)}


def check_range(own: Tensor, size: int, x: DistTensor, cuts: Cuts, operator: str) -> None:
    """Raise RuntimeError on every rank if a position in `own` is out of range on some rank.

    `own` is this rank's block of positions with `cuts`, `size` the number of allowed positions, and
    `x` an operand of `operator`. Collective, unless the positions are not partitioned. On
    accelerators nothing is checked: the host would have to wait for the positions, and torch's
    kernel ends the program.
    """
    if not any(cuts) or is_accelerator(own.device) or not may_read(x):
        return
    extremes = torch.stack(own.aminmax()) if own.numel() else own.new_tensor([0, size - 1])
    lowest, highest = all_gather(extremes, x.grid, AXES).T
    wrong = torch.cat([lowest[lowest < 0], highest[highest >= size]])
    if len(wrong):
        raise RuntimeError(out_of_range(operator, int(wrong[0]), size))


def _exchange(
    asked: _RequestedRows,
    counts: dict[int, list[int]],
    ranks: tuple[int, ...],
    x: DistTensor,
    d: int,
    operator: str,
) -> RowExchange:
    """Return the row exchange of `x` along `d`, after sending the indices of rows. Collective.

    `counts` has for each rank the number of rows that it requests from each holder in `ranks`.
    """
    grid, cuts = x.grid, x.cuts
    here = ranks.index(grid.rank)
    to, of = tuple(counts[grid.rank]), tuple(counts[peer][here] for peer in ranks)
    plan = rows_plan(to, of, ranks, grid.rank, (0,), 0)
    layouts = Layout.of(cuts), Layout.of(replaced_at(cuts, d, ()))
    record(Movement(operator, *layouts, plan, asked.wanted.element_size()))
    requests = gather(asked.wanted, plan, grid) - _start(x.shape[d], cuts[d], grid, grid.rank)
    return RowExchange(operator, grid, ranks, asked.places, asked.wanted, to, requests, of, {})
