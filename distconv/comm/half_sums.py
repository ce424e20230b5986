"""Sums of vectors that travel in half precision, and are added up in single precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distconv.grid.interface import Grid

WIRES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""The types that travel, by name."""

WIDE = (torch.float32, torch.float64)
"""The types of vectors that become smaller in half precision."""


def wire_type(owner: str, wire: str) -> torch.dtype:
    """Return the type that travels; raise ValueError for a name that is none."""
    if wire not in WIRES:
        raise ValueError(f"{owner}: wire={wire!r} is unknown; choose {' or '.join(WIRES)}")
    return WIRES[wire]


class HalfSum:
    """A sum over the ranks along `axes`, under way, the same on all of them.

    They make it together, and complete it together, in the order of all exchanges. Each adds up one
    piece of the vector, so that every rank sends and receives twice as many halves as the vector
    has elements.

    Parameters
    ----------
    purpose: of the communicators.
    """

    def __init__(
        self, flat: Tensor, grid: Grid, axes: Sequence[str], wire: torch.dtype, purpose: str
    ):
        transport = grid.transport
        ranks = grid.topology.peers(grid.rank, axes)
        self._flat, self._wire, self._transport = flat, wire, transport
        self._group = grid.communicator(axes, purpose)
        self._own = ranks.index(grid.rank)
        length = -(-len(flat) // len(ranks))
        self._left_out = flat.new_zeros(len(ranks) * length)
        self._left_out[: len(flat)] = flat
        self._leaving = self._left_out.to(wire).view(len(ranks), length)
        self._arriving = transport.empty((len(ranks), length), self._leaving)
        self._left_out -= self._leaving.view(-1)
        others = [i for i in range(len(ranks)) if i != self._own]
        self._request = transport.exchange(
            [(ranks[i], self._arriving[i]) for i in others],
            [(ranks[i], self._leaving[i]) for i in others],
            transport.next_tag(),
        )

    def complete(self) -> tuple[Tensor, Tensor]:
        """Return the sum; and this rank's share of what it is too small by, from rounding."""
        self._request.wait()
        arriving, own, flat = self._arriving, self._own, self._flat
        arriving[own] = self._leaving[own]
        total = arriving[0].float()
        for piece in arriving[1:]:
            total += piece
        rounded = total.to(self._wire)
        self._left_out.view(arriving.shape)[own] += total - rounded
        sums = self._transport.all_gather(rounded, self._group).view(-1)
        return sums[: len(flat)].to(flat.dtype), self._left_out[: len(flat)]

    def wait(self) -> None:
        """Overwrite the vector by the sum."""
        self._flat.copy_(self.complete()[0])
