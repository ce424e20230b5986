"""The keeper, the sender and the receiver of each box of a sample: the same on all ranks."""

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
    """Samples that no rank kept before a mini-batch.

    Attributes
    ----------
    parts: by the grid axes that cut samples, the part that is to keep each new sample.
    """

    parts: dict[Axes, list[tuple[int, int]]] = field(default_factory=dict)


class Homes:
    """The part of the grid that keeps each sample: the part that has it in its first mini-batch.

    All ranks plan and settle the same arrivals in the same order.

    Parameters
    ----------
    topology: the topology of the grid.
    axes: for each field, the grid axes over which samples are cut.
    """

    def __init__(self, topology: Topology, axes: Iterable[Axes]) -> None:
        self._topology = topology
        self._parts: dict[Axes, dict[int, int]] = {own: {} for own in axes}

    def part(self, axes: Axes, sample: int) -> int:
        """Return the part that keeps a sample."""
        return self._parts[axes][sample]

    def kept(self, axes: Axes, part: int) -> int:
        """Return the number of samples that a part keeps."""
        return sum(own == part for own in self._parts[axes].values())

    def plan(self, batches: Sequence[Sequence[int]], others: Iterable[int] = ()) -> list[Arrivals]:
        """Return the samples of each mini-batch that no part keeps yet.

        `others` are samples of later mini-batches. Those that no part keeps come with the last
        mini-batch, spread over the parts.
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
        """Record that samples are kept where planned; return the parts that keep new ones."""
        new = set()
        for axes, samples in arrivals.parts.items():
            for sample, part in samples:
                if sample not in self._parts[axes]:
                    self._parts[axes][sample] = part
                    new.add((axes, sample))
        return new

    def after(self, axes: Axes, part: int, arrivals: Iterable[Arrivals]) -> int:
        """Return the number of samples that a part keeps once all the arrivals are settled."""
        coming = chain.from_iterable(own.parts[axes] for own in arrivals)
        new = {s for s, home in coming if home == part and s not in self._parts[axes]}
        return self.kept(axes, part) + len(new)


@dataclass(frozen=True)
class CachedBox:
    """A box of a kept sample, on its way into a rank's share of a mini-batch.

    Attributes
    ----------
    field: the number of the field.
    owner: the rank that keeps the box.
    sample: the number of the sample.
    place: the position of the sample in the share.
    piece: the box, and its place in the view of the sample.
    order: the order of the dimensions of that view.
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
    """Yield the boxes that make up a rank's share of a mini-batch, in the same order on all ranks.

    A kept box has replicas along the grid axes that do not cut its field; the rank receives from
    the replica with its own coordinates along these axes.

    `shares` are the samples and boxes that the rank needs of each field.
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
    """Return the other ranks that may receive boxes from `rank` for a mini-batch."""
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
    """Yield the ranks whose boxes of a kept sample intersect a piece of it."""
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
