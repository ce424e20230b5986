"""A cache of samples in the memory of the ranks or on local disks: each sample is read once."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distconv.data.durable import unwritable
from distconv.data.fields import FieldOnGrid, Values, Wanted
from distconv.data.sources.interface import Source
from distconv.data.views import Piece
from distconv.data.writing.formats import write_at
from distconv.geometry.layout import Box, cutting_axes, owning_part
from distconv.geometry.topology import Topology
from distconv.grid.interface import Grid
from distconv.transport.interface import Message


@dataclass(frozen=True)
class _Slot:
    """The key of an array in a `BoxesInFolder`: offset and size in bytes, shape and type."""

    offset: int
    bytes: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class BoxesInFolder:
    """A store of arrays in one unnamed file, which the system removes when the process ends.

    `add` stores an array and returns a key. `get` and `drop` read and remove the array of a key.
    Any thread may call the methods.

    `folder` is a folder on a disk of this node, created if missing. Raises OSError if no file can
    be written to `folder`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder)
        except OSError as error:
            raise unwritable(folder, error) from error
        self._lock = Lock()
        self._end = 0
        self._free: dict[int, list[int]] = {}

    def add(self, values: NDArray[Any]) -> _Slot:
        """Write an array to the file and return its key. Raises OSError if the disk is full."""
        with self._lock:
            free = self._free.get(values.nbytes)
            offset = free.pop() if free else self._end
            self._end = max(self._end, offset + values.nbytes)
        try:
            write_at(self._file.fileno(), values.reshape(-1), offset)
        except OSError as error:
            raise unwritable(self._folder, error, values.nbytes) from error
        return _Slot(offset, values.nbytes, values.shape, values.dtype)

    def get(self, place: _Slot) -> NDArray[Any]:
        """Return the array with the key `place` as a memory map, which reads elements on access."""
        flat = np.memmap(self._file, place.dtype, "r", place.offset, place.shape or (1,))
        return flat.reshape(place.shape)

    def drop(self, place: _Slot) -> None:
        """Remove the array with the key `place`; later arrays of equal size may use its space."""
        with self._lock:
            self._free.setdefault(place.bytes, []).append(place.offset)


# The plan of a `Cache`: which rank keeps, sends and receives each box. All ranks compute the same
# plan without communication.


Axes: TypeAlias = tuple[str, ...]


Arrivals: TypeAlias = dict[Axes, list[tuple[int, int]]]
"""The samples of a mini-batch that no rank keeps yet, and the ranks that will keep each sample.

The keys are the tuples of grid axes over which samples are partitioned. The values are pairs
(sample number, number of the group of ranks); `Homes` defines the groups."""


class Homes:
    """A record of the group of ranks that keeps each sample.

    Samples are partitioned over some grid axes. Ranks with equal coordinates along these axes form
    a group; groups are numbered from 0. The group that holds a sample in its first mini-batch keeps
    the sample. All ranks plan and keep the same mini-batches in the same order.

    Parameters
    ----------
    topology: the topology of the grid.
    axes: for each field, the grid axes over which its samples are partitioned.
    """

    def __init__(self, topology: Topology, axes: Iterable[Axes]) -> None:
        self._topology = topology
        self._parts: dict[Axes, dict[int, int]] = {own: {} for own in axes}

    def part(self, axes: Axes, sample: int) -> int:
        """Return the number of the group that keeps a sample partitioned over `axes`."""
        return self._parts[axes][sample]

    def kept(self, axes: Axes, part: int) -> int:
        """Return the number of samples, partitioned over `axes`, that group `part` keeps."""
        return sum(own == part for own in self._parts[axes].values())

    def plan(self, batches: Sequence[Sequence[int]], others: Iterable[int] = ()) -> list[Arrivals]:
        """Return for each mini-batch the samples that no group of ranks keeps yet.

        `others` are further samples to keep. New samples among `others` are added to the last
        mini-batch and spread evenly over the groups.
        """
        arrivals: list[Arrivals] = [{} for _ in batches]
        for axes, parts in self._parts.items():
            count = self._topology.parts(axes)
            known = set(parts)
            for batch, own in zip(batches, arrivals, strict=True):
                new = own[axes] = []
                for place, sample in enumerate(batch):
                    if sample not in known:
                        known.add(sample)
                        new.append((sample, owning_part(len(batch), count, place)))
            if arrivals:
                missing = [sample for sample in others if sample not in known]
                arrivals[-1][axes] += [(s, i % count) for i, s in enumerate(missing)]
        return arrivals

    def keep(self, arrivals: Arrivals) -> set[tuple[Axes, int]]:
        """Record the samples in `arrivals` as kept; return (axes, sample) of each new sample.

        `axes` are the grid axes over which the sample is partitioned.
        """
        new = set()
        for axes, samples in arrivals.items():
            for sample, part in samples:
                if sample not in self._parts[axes]:
                    self._parts[axes][sample] = part
                    new.add((axes, sample))
        return new

    def after(self, axes: Axes, part: int, arrivals: Iterable[Arrivals]) -> int:
        """Return the number of samples that group `part` keeps once all `arrivals` are recorded."""
        coming = chain.from_iterable(own[axes] for own in arrivals)
        new = {s for s, home in coming if home == part and s not in self._parts[axes]}
        return self.kept(axes, part) + len(new)


@dataclass(frozen=True)
class CachedBox:
    """A box of a cached sample that one rank sends to another for a mini-batch.

    Attributes
    ----------
    field: the number of the field.
    owner: the rank that keeps the box.
    sample: the number of the sample.
    place: the position of the sample among the receiver's samples of the mini-batch.
    piece: the box in the stored sample, and its slices in the receiver's view of the sample.
    order: for each dimension of the view, the dimension of the stored sample.
    """

    field: int
    owner: int
    sample: int
    place: int
    piece: Piece
    order: tuple[int, ...]


def parts_of(
    fields: Sequence[FieldOnGrid],
    shares: Sequence[Wanted],
    homes: Homes,
    topology: Topology,
    rank: int,
) -> Iterator[CachedBox]:
    """Yield the cached boxes that fill the blocks of `rank` of a mini-batch.

    All ranks compute the same boxes in the same order, so sender and receiver agree. A cached box
    is replicated along the grid axes that do not partition its field; `rank` receives from the
    replica with the coordinates of `rank` along these axes.

    `shares` are the samples and views that `rank` needs of each field.
    """
    for own, share in zip(fields, shares, strict=True):
        for place, (sample, view) in enumerate(zip(share.samples, share.views, strict=True)):
            home = homes.part(own.cuts[0], sample)
            for piece in view.pieces:
                for owner in _owners(own, topology, rank, home, piece):
                    part = piece.within(own.stored_box(topology, owner), view.order)
                    if part is not None:
                        yield CachedBox(own.number, owner, sample, place, part, view.order)


def receivers(
    fields: Sequence[FieldOnGrid],
    samples: Sequence[int],
    homes: Homes,
    topology: Topology,
    rank: int,
) -> list[int]:
    """Return the other ranks to which `rank` may have to send cached boxes for a mini-batch.

    `samples` are the numbers of the samples of the mini-batch.
    """
    here = topology.coordinates(rank)
    found: set[int] = set()
    for own in fields:
        axes = own.cuts[0]
        mine, parts = topology.part(here, axes), topology.parts(axes)
        moving = cutting_axes(own.cuts[1:]) if own.moves else ()
        targets = {
            owning_part(len(samples), parts, place)
            for place, sample in enumerate(samples)
            if homes.part(axes, sample) == mine
        }
        for target in targets:
            there = topology.rank(here | topology.unravel(target, axes))
            found.update(topology.peers(there, moving))
    return sorted(found - {rank})


def _owners(
    own: FieldOnGrid, topology: Topology, rank: int, home: int, piece: Piece
) -> Iterator[int]:
    """Yield the ranks of group `home` whose blocks of a stored sample intersect `piece`.

    `own` is the field, and `home` the number of the group that keeps the sample; see `Homes`. Along
    axes that do not partition the field, the ranks have the coordinates of `rank`, the receiver.
    """
    here = topology.coordinates(rank) | topology.unravel(home, own.cuts[0])
    meeting = [
        range(owning_part(n, parts, a), owning_part(n, parts, b - 1) + 1)
        for n, parts, a, b in zip(
            own.source.shape,
            map(topology.parts, own.cuts[1:]),
            piece.source.start,
            piece.source.stop,
            strict=True,
        )
    ]
    for chosen in product(*meeting):
        there = dict(here)
        for axes, part in zip(own.cuts[1:], chosen, strict=True):
            there |= topology.unravel(part, axes)
        yield topology.rank(there)


# The cache: each box stays on the rank that read it first, and is sent to ranks that need it later.


Loaded: TypeAlias = dict[tuple[int, int], Any]
"""Boxes read by this rank, or their keys in a `BoxesInFolder`, by (field number, sample)."""

Read: TypeAlias = Callable[[Source, int, Box, NDArray[Any]], None]

Arriving: TypeAlias = Callable[[], Values]
"""A function that waits for the messages of a mini-batch and returns this rank's elements."""


class Cache:
    """A cache in memory or on local disks: each rank keeps the boxes of samples it has read.

    A mini-batch takes four calls: `plan`, `load`, `keep` and `start`. `load` does not communicate
    and may run in a background thread. All ranks make the other three calls in the same order.

    Parameters
    ----------
    fields: the fields of the samples.
    grid: the process grid.
    read: `read(source, sample, box, out)` reads a box of a sample from a source into `out`.
    where: "memory", or a folder on a disk of this node.
    limit: the largest number of bytes that each rank keeps; None for no limit.

    Attributes
    ----------
    bytes_received: bytes of samples that this rank has received from other ranks.
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
            raise ValueError(f"cache_limit={limit} is not a number of bytes; choose 1 or more")
        self._fields, self._grid, self._read, self._limit = fields, grid, read, limit
        self._file = None if where == "memory" else BoxesInFolder(Path(where))
        """The file that holds the cached boxes; None if they are kept in memory."""
        self._homes = Homes(grid.topology, [own.cuts[0] for own in fields])
        self._kept: Loaded = {}
        self.bytes_received = 0

    def plan(self, batches: Sequence[Sequence[int]], others: Iterable[int] = ()) -> list[Arrivals]:
        """Return for each mini-batch the samples that no rank keeps yet. No communication.

        `others` are samples beyond the mini-batches that are to be cached, too. Samples in `others`
        that no rank keeps are added to the last entry. Raises ValueError if this rank would keep
        more bytes than the limit.
        """
        arrivals = self._homes.plan(batches, others)
        if self._limit is not None:
            size = sum(
                self._homes.after(own.cuts[0], self._part(own), arrivals) * self._bytes(own)
                for own in self._fields
            )
            if size > self._limit:
                ways = "use more ranks, or raise the limit"
                if self._file is None:
                    ways += ", or choose cache='/folder' on a disk of each node"
                raise ValueError(
                    f"cache: rank {self._grid.rank} would keep {size:,} bytes of samples, more "
                    f"than cache_limit={self._limit:,}; {ways}"
                )
        return arrivals

    def load(self, arrivals: Arrivals) -> Loaded:
        """Read and return this rank's boxes of the new samples of a mini-batch. No communication.

        `arrivals` is the mini-batch's entry in the result of `plan`.
        """
        loaded = {}
        # Samples first, then fields: a torch dataset loads all fields of a sample at once.
        samples = dict.fromkeys(s for new in arrivals.values() for s, _ in new)
        keepers = {axes: dict(new) for axes, new in arrivals.items()}
        for sample in samples:
            for own in self._fields:
                box = own.stored_box(self._grid.topology, self._grid.rank)
                if keepers[own.cuts[0]].get(sample) == self._part(own) and box.size:
                    values = np.empty(box.shape, own.source.dtype)
                    self._read(own.source, sample, box, values)
                    place = values if self._file is None else self._file.add(values)
                    loaded[own.number, sample] = place
        return loaded

    def keep(self, arrivals: Arrivals, loaded: Loaded) -> None:
        """Record the new samples of a mini-batch as kept, and keep this rank's boxes.

        All ranks call `keep` with the same entries of `plan`, in order; nothing is sent. `loaded`
        is the result of `load(arrivals)` on this rank.
        """
        new = self._homes.keep(arrivals)
        for (number, sample), place in loaded.items():
            if (self._fields[number].cuts[0], sample) in new:
                self._kept[number, sample] = place
            elif self._file is not None:
                self._file.drop(place)  # another loader has read the sample meanwhile

    def start(self, values: Values) -> Arriving:
        """Start to send the cached boxes of a mini-batch to the ranks that need them. Collective.

        All ranks call `start` for the same mini-batch, after `keep`. `values` lists the elements
        that this rank needs and holds the arrays to fill. Returns a function that waits for the
        messages, fills the arrays, and returns `values`.
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

        def wait() -> Values:
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

        return wait

    def _place(self, values: Values, part: CachedBox, box: NDArray[Any]) -> None:
        part.piece.place(values.arrays[part.field][part.place, ...], box, part.order)

    def _box(self, part: CachedBox) -> NDArray[Any]:
        """Return the elements of `part`, a box of a sample that this rank keeps."""
        own = self._fields[part.field]
        kept = own.stored_box(self._grid.topology, self._grid.rank)
        index = part.piece.source.slices_within(kept)
        place = self._kept[part.field, part.sample]
        return (place if self._file is None else self._file.get(place))[index]

    def _size(self, part: CachedBox) -> int:
        return part.piece.source.size * self._fields[part.field].source.dtype.itemsize

    def _bytes(self, own: FieldOnGrid) -> int:
        box = own.stored_box(self._grid.topology, self._grid.rank)
        return box.size * own.source.dtype.itemsize

    def _part(self, own: FieldOnGrid) -> int:
        """Return the number of this rank's group for samples of the field `own`; see `Homes`."""
        return self._grid.topology.part(self._grid.coords, own.cuts[0])


def _packed(boxes: Sequence[NDArray[Any]]) -> Tensor:
    """Return the bytes of all boxes, concatenated in one uint8 tensor."""
    flat = [np.ascontiguousarray(box).reshape(-1).view(np.uint8) for box in boxes]
    return torch.from_numpy(np.concatenate(flat))
