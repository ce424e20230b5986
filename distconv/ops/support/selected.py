"""Elements that masks pick on all ranks, brought to all ranks in the serial order.

In row-major order a block's elements come in runs, one for each position along the dimensions
before the last cut one. The ranks exchange the number of picked elements of each run, and then
these elements only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distconv.comm.ledger import Movement, record
from distconv.comm.transfer import gather
from distconv.geometry.concatenation import concatenation
from distconv.geometry.layout import Box, Cuts, Layout, Shape, cutting_axes, rank_box
from distconv.tensor.dist_tensor import DistTensor


class Selection:
    """The elements that a distributed mask picks, numbered in the serial order. Collective.

    All ranks of the grid create it together, to read or write the picked elements. `operator` is
    the called function, for records.

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
        """Return the numbers that this rank's picked elements have among all picked elements."""
        if self._places is None:
            return torch.arange(self.total, device=self.here.device)
        return self._places.split(self._lengths)[self._own]

    def bring(self, rows: Tensor, cuts: Cuts = ()) -> Tensor:
        """Return all ranks' `rows` for picked elements, in row-major order. Collective.

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
        return gather(rows, plan, self._grid)


def _runs(shape: Shape, box: Box, last: int, device: torch.device) -> Tensor:
    """Return the row-major index, in dimensions 0 to `last`, at which each run of a block starts.

    A run goes along dimension `last`, the last cut one, and the dimensions after it.
    """
    keys = torch.zeros((), dtype=torch.int64, device=device)
    for n, start, stop in zip(shape[:last], box.start, box.stop, strict=False):
        keys = keys.unsqueeze(-1) * n + torch.arange(start, stop, device=device)
    return keys.reshape(-1) * shape[last] + box.start[last]


def _in_order(keys: Tensor, counts: Tensor) -> Tensor:
    """Return the place that each element has after its run is sorted among all runs.

    Run i has `counts[i]` elements and the sort key `keys[i]`; elements are listed run after run.
    """
    order = keys.argsort()
    starts = torch.empty_like(counts)
    starts[order] = counts[order].cumsum(0) - counts[order]
    shift = starts - (counts.cumsum(0) - counts)
    elements = shift.repeat_interleave(counts)
    return elements + torch.arange(len(elements), device=keys.device)
