"""The sender and the receiver of each box of a kept sample, which every rank works out alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from distconv.data.cache.homes import Homes
from distconv.data.fields import FieldOnGrid, Wanted
from distconv.data.views import Piece
from distconv.geometry.layout import cutting_axes, owning_part
from distconv.geometry.topology import Topology


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

    Parameters
    ----------
    shares: the samples and boxes that the rank needs of each field.
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
