"""Sums in two levels: among the ranks of a sample, and then piece by piece between replicas.

A reduce-scatter within each sample leaves every rank one piece, an all-reduce over the replicas
adds up the pieces, and an all-gather within each sample puts them together. With the ranks of a
sample on one node, 1 / P_S of the bytes of a flat all-reduce leave each rank for other nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from distconv.grid.interface import Grid
from distconv.transport.interface import SUM_TYPES

_BETWEEN = "sample"
"""The axis of the replicas."""


def levels(axes: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the axes of a sum within a sample, and those between replicas."""
    within = tuple(axis for axis in axes if axis != _BETWEEN)
    return within, tuple(axis for axis in axes if axis == _BETWEEN)


def has_two_levels(axes: Sequence[str], grid: Grid) -> bool:
    """Return whether a sum over these axes has several ranks on both levels."""
    return all(grid.topology.parts(level) > 1 for level in levels(axes))


class ReduceScatter:
    """A vector that is being added up over the ranks along `axes`, each of which gets a piece.

    All of them make it together, in the order of all exchanges. The pieces are of one length, the
    last ones filled up with zeros; they are added up in the order of the ranks, halves in float32.
    """

    def __init__(self, flat: Tensor, grid: Grid, axes: Sequence[str]):
        transport = grid.transport
        ranks = grid.topology.peers(grid.rank, axes)
        self._own = ranks.index(grid.rank)
        length = -(-len(flat) // len(ranks))
        self.start = self._own * length
        """Where in the vector the piece of this rank begins."""
        self._pieces = flat.new_zeros(len(ranks), length)
        self._pieces.view(-1)[: len(flat)] = flat
        self._arriving = transport.empty((len(ranks), length), flat)
        others = [i for i in range(len(ranks)) if i != self._own and length]
        self._request = transport.exchange(
            [(ranks[i], self._arriving[i]) for i in others],
            [(ranks[i], self._pieces[i]) for i in others],
            transport.next_tag(),
        )

    def wait(self) -> Tensor:
        """Return the piece of this rank."""
        self._request.wait()
        self._arriving[self._own] = self._pieces[self._own]
        wide = SUM_TYPES.get(self._arriving.dtype, self._arriving.dtype)
        total = self._arriving[0].to(wide, copy=True)
        for piece in self._arriving[1:]:
            total += piece
        return total


def all_gather_pieces(
    piece: Tensor, elements: int, grid: Grid, axes: Sequence[str], purpose: str
) -> Tensor:
    """Return the vector whose pieces the ranks along `axes` have, which call it together."""
    if grid.topology.parts(axes) == 1:
        return piece[:elements]
    group = grid.communicator(axes, purpose)
    return grid.transport.all_gather(piece, group).view(-1)[:elements]


class TwoLevelSum:
    """A sum in place over the ranks along `axes`, under way; all of them make it, and wait for it.

    The reduce-scatter starts at once, the rest follows in `wait`. Both come in one order on all
    ranks of the grid.

    Parameters
    ----------
    purpose: of the communicators along the axes of each of the `levels`, which all ranks of the
        grid have made together before.
    """

    def __init__(self, flat: Tensor, grid: Grid, axes: Sequence[str], purpose: str):
        self._flat, self._grid, self._purpose = flat, grid, purpose
        self._within, self._between = levels(axes)
        self._scattered = ReduceScatter(flat, grid, self._within)

    def wait(self) -> None:
        """Complete the sum."""
        grid, flat = self._grid, self._flat
        piece = self._scattered.wait()
        grid.transport.all_reduce(piece, grid.communicator(self._between, self._purpose)).wait()
        piece = piece.to(flat.dtype)
        flat.copy_(all_gather_pieces(piece, len(flat), grid, self._within, self._purpose))
