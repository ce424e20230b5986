"""Who sends which boxes of kept samples to whom: every rank knows it from the same arithmetic."""

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
    owner: the rank that keeps it.
    sample: the sample.
    place: where in the share the sample is.
    piece: the box, and where in the sample's view it belongs.
    order: of that view.
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
    """Yield what makes up the shares of a mini-batch that a rank wants, in an order that all know.

    A rank takes from that replica of a kept box that has its own coordinates along the grid axes
    that do not cut the field.

    Parameters
    ----------
    shares: what the rank wants of each field.
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
    """Return the ranks, but for itself, that may take boxes from a rank for a mini-batch."""
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
    """Yield the ranks whose boxes of a kept sample meet a piece of it."""
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
