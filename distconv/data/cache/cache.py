"""Samples that are read once: each box stays on the rank that read it first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distconv.data.cache.boxes import BoxesInFolder, BoxesInMemory
from distconv.data.cache.exchange import Arrivals, CachedBox, Homes, parts_of, receivers
from distconv.data.fields import FieldOnGrid, Values
from distconv.data.sources.interface import Source
from distconv.geometry.layout import Box
from distconv.grid.interface import Grid
from distconv.transport.interface import Message

Loaded: TypeAlias = dict[tuple[int, int], Any]
"""The key of each box, by field and sample."""

Read: TypeAlias = Callable[[Source, int, Box, NDArray[Any]], None]

Arriving: TypeAlias = Callable[[], Values]
"""A function that waits for the messages of a mini-batch, and returns this rank's values."""


class Cache:
    """Samples in memory or on a local disk, whose boxes stay on the ranks that read them first.

    A mini-batch takes four calls: `plan`, `load`, `settle` and `start`. `load` sends nothing and
    may run in a background thread; all ranks make the other three together, in one order.

    Parameters
    ----------
    fields: the fields of the samples.
    grid: the process grid.
    read: `read(source, sample, box, out)` reads a box of a sample from a source into `out`.
    where: "memory", or a folder on a disk of this node.
    limit: bytes that each rank may keep; None for no limit.

    Attributes
    ----------
    bytes_received: bytes of samples that came from other ranks.
    """

    def __init__(
        self,
        fields: Sequence[FieldOnGrid],
        grid: Grid,
        read: Read,
        where: str | Path,
        limit: int | None,
    ) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"cache_limit={limit} is no number of bytes; choose 1 or more")
        self._fields, self._grid, self._read, self._limit = fields, grid, read, limit
        self._where = where
        self._boxes: Any = BoxesInMemory() if where == "memory" else BoxesInFolder(Path(where))
        self._homes = Homes(grid.topology, [own.cuts[0] for own in fields])
        self._kept: Loaded = {}
        self.bytes_received = 0

    def plan(self, batches: Sequence[Sequence[int]], others: Iterable[int] = ()) -> list[Arrivals]:
        """Return for each mini-batch the samples that no rank keeps yet. No communication.

        `others` are samples beyond these mini-batches, to be read as well; those that no rank keeps
        are added to the last entry. Raises ValueError if this rank would keep more bytes than the
        limit.
        """
        arrivals = self._homes.plan(batches, others)
        if self._limit is not None:
            size = sum(
                self._homes.after(own.cuts[0], self._part(own), arrivals) * self._bytes(own)
                for own in self._fields
            )
            if size > self._limit:
                ways = "use more ranks, or raise the limit"
                if self._where == "memory":
                    ways += ", or choose cache='/folder' on a disk of each node"
                raise ValueError(
                    f"cache: rank {self._grid.rank} would keep {size:,} bytes of samples, and "
                    f"cache_limit={self._limit:,}; {ways}"
                )
        return arrivals

    def load(self, arrivals: Arrivals) -> Loaded:
        """Read the boxes of new samples that this rank is to keep. No communication.

        `arrivals` are the new samples, from `plan`.
        """
        loaded = {}
        # Sample by sample, as fields of one sample may have to be fetched together.
        samples = dict.fromkeys(s for new in arrivals.parts.values() for s, _ in new)
        keepers = {axes: dict(new) for axes, new in arrivals.parts.items()}
        for sample in samples:
            for own in self._fields:
                box = own.stored_box(self._grid.topology, self._grid.rank)
                if keepers[own.cuts[0]].get(sample) == self._part(own) and box.size:
                    values = np.empty(box.shape, own.source.dtype)
                    self._read(own.source, sample, box, values)
                    loaded[own.number, sample] = self._boxes.add(values)
        return loaded

    def settle(self, arrivals: Arrivals, loaded: Loaded) -> None:
        """Record new samples as kept. All ranks call it, with the results of `plan` in order."""
        new = self._homes.settle(arrivals)
        for (number, sample), place in loaded.items():
            if (self._fields[number].cuts[0], sample) in new:
                self._kept[number, sample] = place
            else:
                # Another loader was faster.
                self._boxes.drop(place)

    def start(self, values: Values) -> Arriving:
        """Start to send the kept boxes of a mini-batch to the ranks that need them.

        All ranks call it for the same mini-batch, after `settle`. `values` says which elements this
        rank needs, and has the arrays to fill. Returns a function that waits for the messages,
        fills the arrays, and returns `values`.
        """
        grid, topology = self._grid, self._grid.topology
        incoming: dict[int, list[CachedBox]] = defaultdict(list)
        for part in parts_of(self._fields, values.wanted, self._homes, topology, grid.rank):
            if part.owner == grid.rank:
                self._place(values, part, self._box(part))
            else:
                incoming[part.owner].append(part)
        leaving: list[Message] = []
        for peer in receivers(self._fields, values.samples, self._homes, topology, grid.rank):
            shares = [
                own.wanted(values.samples, values.epoch, topology, peer) for own in self._fields
            ]
            own_parts = [
                self._box(part)
                for part in parts_of(self._fields, shares, self._homes, topology, peer)
                if part.owner == grid.rank
            ]
            if own_parts:
                leaving.append((peer, _packed(own_parts).to(grid.device)))
        byte = torch.empty(0, dtype=torch.uint8, device=grid.device)
        arriving = []
        for peer, parts in sorted(incoming.items()):
            size = sum(self._size(part) for part in parts)
            self.bytes_received += size
            arriving.append((peer, grid.transport.empty((size,), byte)))
        request = None
        if grid.size > 1:
            request = grid.transport.exchange(arriving, leaving, grid.transport.next_tag())

        def finish() -> Values:
            if request is not None:
                request.wait()
            for peer, message in arriving:
                content, begin = message.cpu().numpy(), 0
                for part in incoming[peer]:
                    end = begin + self._size(part)
                    dtype = self._fields[part.field].source.dtype
                    box = content[begin:end].view(dtype).reshape(part.piece.source.shape)
                    self._place(values, part, box)
                    begin = end
            return values

        return finish

    def _place(self, values: Values, part: CachedBox, box: NDArray[Any]) -> None:
        part.piece.place(values.arrays[part.field][part.place, ...], box, part.order)

    def _box(self, part: CachedBox) -> NDArray[Any]:
        """Return the elements of a box that this rank keeps."""
        own = self._fields[part.field]
        kept = own.stored_box(self._grid.topology, self._grid.rank)
        index = tuple(
            slice(a - first, b - first)
            for a, b, first in zip(
                part.piece.source.start, part.piece.source.stop, kept.start, strict=True
            )
        )
        return self._boxes.get(self._kept[part.field, part.sample])[index]

    def _size(self, part: CachedBox) -> int:
        return part.piece.source.size * self._fields[part.field].source.dtype.itemsize

    def _bytes(self, own: FieldOnGrid) -> int:
        box = own.stored_box(self._grid.topology, self._grid.rank)
        return box.size * own.source.dtype.itemsize

    def _part(self, own: FieldOnGrid) -> int:
        """Return this rank's part, a number from 0, along the axes that cut a field's samples."""
        return self._grid.topology.part(self._grid.coords, own.cuts[0])


def _packed(boxes: Sequence[NDArray[Any]]) -> Tensor:
    """Return the bytes of all boxes, concatenated."""
    flat = [np.ascontiguousarray(box).reshape(-1).view(np.uint8) for box in boxes]
    return torch.from_numpy(np.concatenate(flat))
