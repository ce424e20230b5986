"""Rows of a partitioned dimension, of which each rank asks for the rows that its positions name.

The ranks exchange the numbers of rows for which they ask, then their indices, and then the rows.
Indices are kept for as long as the tensor of positions exists and is not written to, so a mesh or
graph with constant connectivity sends them once. Whether a rank still has them depends on its
objects, so in each call the ranks compare the numbers of their kept decisions.
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
"""The number of exchanges kept for one tensor of positions."""

MOST_MOVED = 0.75
"""The largest share of all rows that the busiest rank receives, its indices counted by their bytes.

If it is more, every rank gathers all rows."""

_KEPT = WeakTensorKeyDictionary()
"""For each tensor of positions the number of writes to it, and the kept decisions."""

_latest = 0
"""The number of the last decision that this rank has taken with others."""


class RowExchange(NamedTuple):
    """An exchange of rows along one partitioned dimension, as one rank sees it.

    Attributes
    ----------
    ranks: the ranks that hold rows, in the order of their blocks.
    places: for each position on this rank, the place of its row in the result of `fetch`.
    wanted: the numbers of the rows of `fetch`, ascending.
    asked: the number of rows for which this rank asks each of `ranks`.
    requests: the rows of this rank's block for which `ranks` ask, one rank after the other.
    requested: the number of rows for which each of `ranks` asks this rank.
    plans: the plans for blocks of different shapes.
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
        """Return the rows along `d` for which this rank asks, from all ranks' blocks.

        Differentiable. All ranks call it; `cuts` are those of the tensor, for the ledger.
        """
        plan = self._plan(block, d, cuts, adjoint=False)
        return gather(block.index_select(d, self.requests), plan, self.grid)

    def add_up(self, rows: Tensor, d: int, cuts: Cuts) -> Tensor:
        """Return the sums of all ranks' `rows`, which `fetch` returns, in the order of `requests`.

        Differentiable, the adjoint of the exchange in `fetch`. All ranks call it.
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


class _Asked(NamedTuple):
    """The rows for which this rank asks: see `RowExchange`.

    `message` is what it tells the others: whether a position is out of range, which, and `asked`.
    """

    wanted: Tensor
    places: Tensor
    message: Tensor


class _Known(NamedTuple):
    """A common decision of ranks for some positions: an exchange, or None to gather all rows.

    Attributes
    ----------
    number: the number of the decision, the same on the ranks that have taken it.
    asked: None if few rows were gathered when the positions were used for the first time.
    lent: a copy of this rank's positions if NumPy shares their memory, as torch does not count its
        writes.
    """

    number: int
    asked: _Asked | None
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
    """Return the exchange of the rows along `d` at some positions. Collective.

    Returns None, alike on all ranks, if all rows should be gathered: dimension `d` is whole, nearly
    all rows are needed, positions must not be read, or rows are few and positions are used for the
    first time.

    Parameters
    ----------
    positions: the tensor of positions that the program passes.
    own: this rank's block of it.
    among: the cuts of these blocks.
    operator: the called function, for errors and records.
    wraps: whether negative positions are counted from the end.
    error: the type raised on every rank if a position is out of range.
    """
    grid, size, axes = x.grid, x.shape[d], x.cuts[d]
    plain, few = not isinstance(positions, DistTensor), _few(x, d)
    if not axes or not may_read(x) or (few and not plain):
        return None
    memory = own.storage_offset(), own.shape, own.stride()
    row = _size_of_row(x, d), x.shard.element_size()
    key = memory, positions.shape, size, axes, grid, row, among, operator, wraps
    kept = _kept(own)
    known: _Known | None = kept.get(key)
    lent = not own.untyped_storage().resizable()
    if lent and known is not None and (known.lent is None or not torch.equal(known.lent, own)):
        known = None
    every = tuple(dict.fromkeys((*axes, *cutting_axes(among))))
    number, again = _agreed(known, grid, every, own.device)
    if known is not None and known.asked is not None and again:
        return known.exchange
    copy = own.clone() if lent else None
    if few and not again:
        kept[key] = _Known(number, None, None, copy)
        return None
    asked = None if known is None else known.asked
    with torch.inference_mode(False):
        ranks = _holders(axes, grid)
        asked = asked or _ask(own, size, ranks, axes, grid, wraps)
        counts = _told(asked, size, grid, every, operator, error)
        less = _moves_less(counts, x, d)
        made = _exchange(asked, counts, ranks, x, d, operator) if less else None
        kept[key] = _Known(number, asked, made, copy)
    return made


def _agreed(known: _Known | None, grid: Grid, axes: Axes, device: torch.device) -> tuple[int, bool]:
    """Return a number for the next decision, and whether all ranks know the same one. Collective.

    Without an agreement one rank could find what it has kept, while another has a new tensor.
    """
    global _latest
    mine = torch.tensor([0 if known is None else known.number, _latest], device=device)
    numbers, latest = all_gather(mine, grid, axes).T.tolist()
    _latest = max(latest) + 1
    return _latest, numbers[0] > 0 and len(set(numbers)) == 1


def _peers(grid: Grid, axes: Axes) -> tuple[int, ...]:
    return grid.topology.peers(grid.rank, axes)


def _kept(own: Tensor) -> dict[Any, _Known]:
    """Return the kept exchanges for the memory of `own`, none after a write to it."""
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
    """Return the number of elements in a row of `x` along `d`, on the rank that has most."""
    largest = rank_box(tuple(x.shape), x.cuts, x.grid.topology, 0)
    return prod(replaced_at(largest.shape, d, 1))


def _few(x: DistTensor, d: int) -> bool:
    """Return whether the rows of `x` are so few that asking for some takes longer than all."""
    return _size_of_row(x, d) * x.shape[d] <= thresholds(x.grid.computes_on_gpu).gathered_rows


def _moves_less(counts: dict[int, list[int]], x: DistTensor, d: int) -> bool:
    """Return whether the exchange moves fewer bytes to the busiest rank than `MOST_MOVED` allows.

    `counts` has for each rank the number of rows for which it asks each holder.
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
    """Return the ranks that hold the rows, in the order of their blocks."""
    topology = grid.topology
    return tuple(
        sorted(_peers(grid, axes), key=lambda r: topology.part(topology.coordinates(r), axes))
    )


def _start(size: int, axes: Axes, grid: Grid, rank: int) -> int:
    return rank_box((size,), (axes,), grid.topology, rank).start[0]


def _ask(
    own: Tensor, size: int, ranks: tuple[int, ...], axes: Axes, grid: Grid, wraps: bool
) -> _Asked:
    # Of an index that is expanded over channels, for example, one channel is sorted.
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
    return _Asked(wanted, places, torch.cat([torch.stack([wrong.long(), position.long()]), counts]))


def _index_type(size: int) -> torch.dtype:
    """Return the type of the numbers of `size` rows, in messages and in memory."""
    return torch.int32 if size <= torch.iinfo(torch.int32).max else torch.int64


def _told(
    asked: _Asked, size: int, grid: Grid, axes: Axes, operator: str, error: type[Exception]
) -> dict[int, list[int]]:
    """Return for each rank along `axes` how many rows it asks of each holder. Collective.

    Raises `error` on every rank if a position on one of them is out of range.
    """
    told = all_gather(asked.message, grid, axes).tolist()
    for wrong, position, *_ in told:
        if wrong:
            raise error(out_of_range(operator, position, size))
    return {rank: row[2:] for rank, row in zip(_peers(grid, axes), told, strict=True)}


def check_range(own: Tensor, size: int, x: DistTensor, cuts: Cuts, operator: str) -> None:
    """Raise RuntimeError on every rank if one has a position out of range in `own`.

    `x` is an operand of `operator`, and `cuts` are those of the positions. Collective, unless every
    rank has all positions: one rank alone may compute with what it has in full. On accelerators
    nothing is checked: positions would have to be waited for, and torch's kernel ends the program.
    """
    if not any(cuts) or is_accelerator(own.device) or not may_read(x):
        return
    extremes = torch.stack(own.aminmax()) if own.numel() else own.new_tensor([0, size - 1])
    lowest, highest = all_gather(extremes, x.grid, AXES).T
    wrong = torch.cat([lowest[lowest < 0], highest[highest >= size]])
    if len(wrong):
        raise RuntimeError(out_of_range(operator, int(wrong[0]), size))


def _exchange(
    asked: _Asked,
    counts: dict[int, list[int]],
    ranks: tuple[int, ...],
    x: DistTensor,
    d: int,
    operator: str,
) -> RowExchange:
    """Tell the holders which rows this rank asks for, and return the exchange. Collective."""
    grid, cuts = x.grid, x.cuts
    here = ranks.index(grid.rank)
    to, of = tuple(counts[grid.rank]), tuple(counts[peer][here] for peer in ranks)
    plan = rows_plan(to, of, ranks, grid.rank, (0,), 0)
    layouts = Layout.of(cuts), Layout.of(replaced_at(cuts, d, ()))
    record(Movement(operator, *layouts, plan, asked.wanted.element_size()))
    requests = gather(asked.wanted, plan, grid) - _start(x.shape[d], cuts[d], grid, grid.rank)
    return RowExchange(operator, grid, ranks, asked.places, asked.wanted, to, requests, of, {})
