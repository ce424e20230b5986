"""Gradients that are sent once a backward pass has ended, and not within it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from distconv.grid.process_grid import ProcessGrid
from distconv.model.gradient_reduction import axes_of_sum
from distconv.ops.support.constants import constant
from distconv.tensor.nested import shards_of


class GradientMessage(NamedTuple):
    """Blocks of gradients of one type that are summed over the same grid axes.

    `flat` concatenates them, followed by one number for each: 1 where this rank has the gradient,
    else 0; after the sum it is the number of ranks that have it. `places` has the number of each
    block's parameter, and its shape.
    """

    axes: tuple[str, ...]
    flat: Tensor
    places: list[tuple[int, torch.Size]]


class GradientPacking:
    """The packing of this rank's gradients of a parallelized module into messages.

    All ranks of the grid make it together. Each purpose has communicators of its own.
    """

    def __init__(self, module: nn.Module, grid: ProcessGrid, purpose: str):
        self._parameters = list(module.parameters())
        self._axes = [axes_of_sum(p, grid) for p in self._parameters]
        self._grid = grid
        for axes in dict.fromkeys(self._axes):
            # All ranks make it together, whichever parameters each of them trains first.
            grid.communicator(axes, purpose)

    @property
    def leaves(self) -> list[Tensor]:
        """Return the parameters as autograd knows them: this rank's blocks of sharded ones."""
        return shards_of(self._parameters)

    def pack(self) -> list[GradientMessage]:
        """Return copies of the gradients in as few messages as possible; zeros for None."""
        kinds: dict[tuple[tuple[str, ...], torch.dtype], list[int]] = defaultdict(list)
        leaves = self.leaves
        for i, p in enumerate(leaves):
            if p.requires_grad:
                kinds[self._axes[i], p.dtype].append(i)
        messages = []
        for (axes, dtype), numbers in kinds.items():
            here = [leaves[i].grad is not None for i in numbers]
            flags = constant(self._grid.device, tuple(here), dtype)
            flat = torch.cat([*(_part(leaves[i]).reshape(-1) for i in numbers), flags])
            places = [(i, leaves[i].shape) for i in numbers]
            messages.append(GradientMessage(axes, flat, places))
        return messages

    def unpack(self, messages: Iterable[GradientMessage]) -> list[Tensor | None]:
        """Return the sums in the messages, one for each leaf; None where no rank has a gradient."""
        sums: list[Tensor | None] = [None] * len(self._parameters)
        for _, flat, places in messages:
            sizes = [shape.numel() for _, shape in places]
            *pieces, flags = flat.split([*sizes, len(places)])
            for (i, shape), piece, ranks in zip(places, pieces, flags.tolist(), strict=True):
                sums[i] = piece.view(shape) if ranks else None
        return sums


def _part(p: Tensor) -> Tensor:
    return torch.zeros_like(p, requires_grad=False) if p.grad is None else p.grad
