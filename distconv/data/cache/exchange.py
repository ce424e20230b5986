"""Which rank of a `Cache` keeps, sends and receives each box; all ranks find the same answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from typing import TypeAlias

from distconv.data.fields import FieldOnGrid, Wanted
from distconv.data.views import Piece
from distconv.geometry.layout import cutting_axes, owning_part
from distconv.geometry.topology import Topology

Axes: TypeAlias = tuple[str, ...]


@dataclass
class Arrivals:
    """The samples of a mini-batch that no rank keeps yet.

    Attributes
    ----------
    parts: for each choice of grid axes that cut samples, pairs of a sample's number and the number
        of the part of the grid, along these axes, that is to keep it.
    """

    parts: dict[Axes, list[tuple[int, int]]] = field(default_factory=dict)


class Homes:
    """A record of which part of the grid, along the axes that cut samples, keeps each sample.

    A sample is kept by the part that holds it in its first mini-batch. All ranks plan and settle
    the same mini-batches in the same order.

    Parameters
    ----------
    topology: the topology of the grid.
    axes: for each field, the grid axes over which samples are cut.
    """

    def __init__(self, topology: Topology, axes: Iterable[Axes]) -> None:
        self._topology = topology
        self._parts: dict[Axes, dict[int, int]] = {own: {} for own in axes}

    def part(self, axes: Axes, sample: int) -> int:
        """Return the part of the grid, along the axes that cut samples, that keeps a sample."""
        return self._parts[axes][sample]

    def kept(self, axes: Axes, part: int) -> int:
        """Return the number of samples that a part of the grid, along `axes`, keeps."""
        return sum(own == part for own in self._parts[axes].values())

    def plan(self, batches: Sequence[Sequence[int]], others: Iterable[int] = ()) -> list[Arrivals]:
        """Return for each mini-batch the samples that no part of the grid keeps yet.

        `others` are further samples; those that are new are added to the last mini-batch, spread
        evenly over the parts.
        """
        arrivals = [Arrivals() for _ in batches]
        for axes, parts in self._parts.items():
            count = self._topology.parts(axes)
            known = set(parts)
            for batch, own in zip(batches, arrivals, strict=True):
                new = own.parts[axes] = []
                for place, sample in enumerate(batch):
                    if sample not in known:
                        known.add(sample)
                        new.append((sample, owning_part(len(batch), count, place)))
            if arrivals:
                missing = [sample for sample in others if sample not in known]
                arrivals[-1].parts[axes] += [(s, i % count) for i, s in enumerate(missing)]
        return arrivals

    def settle(self, arrivals: Arrivals) -> set[tuple[Axes, int]]:
        """Record that the samples in `arrivals` are kept; return the new ones as (axes, sample).

        `axes` are the grid axes that cut samples.
        """
        new = set()
        for axes, samples in arrivals.parts.items():
            for sample, part in samples:
                if sample not in self._parts[axes]:
                    self._parts[axes][sample] = part
                    new.add((axes, sample))
        return new

    def after(self, axes: Axes, part: int, arrivals: Iterable[Arrivals]) -> int:
        """Return the number of samples that a part will keep when all `arrivals` are settled."""
        coming = chain.from_iterable(own.parts[axes] for own in arrivals)
        new = {s for s, home in coming if home == part and s not in self._parts[axes]}
        return self.kept(axes, part) + len(new)


@dataclass(frozen=True)
class CachedBox:
    """A box of a kept sample that one rank sends to another for a mini-batch.

    Attributes
    ----------
    field: the number of the field.
    owner: the rank that keeps the box.
    sample: the number of the sample.
    place: the position of the sample among the receiver's samples of the mini-batch.
    piece: the box in the stored sample, and its place in the receiver's view of it.
    order: the order of the dimensions of this view.
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
    """Yield the kept boxes that fill one rank's blocks of a mini-batch, in one order on all ranks.

    A kept box has replicas along the grid axes that do not cut its field; the rank receives from
    the replica with its own coordinates along these axes.

    `shares` are the samples and views that the rank needs of each field.
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
    """Return the other ranks that may need boxes that `rank` keeps for a mini-batch.

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
    """Yield the ranks in one part of the grid whose boxes of a sample intersect `piece`.

    `own` is the field, and `home` the number of the part, along the axes that cut samples. Along
    axes that cut no dimension of the field these ranks have the coordinates of `rank`, the
    receiver.
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
