"""Messages that hold all gradients of a model, sent after a backward pass and not within it."""

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
    """Gradients of one type to be summed over the same grid axes, in one vector `flat`.

    Behind the elements, `flat` has a number for each gradient: 1 if this rank has it, else 0; after
    the sum, the number of ranks that have it. `places` has the numbers and shapes of the
    parameters.
    """

    axes: tuple[str, ...]
    flat: Tensor
    places: list[tuple[int, torch.Size]]


class GradientPacking:
    """Packs this rank's gradients of a parallelized module into messages, and unpacks their sums.

    All ranks of the grid make it together. `purpose` names the communicators for the sums, so that
    sums of different purposes do not share a communicator.
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
        """Return the leaves of autograd: each parameter, or this rank's block of a sharded one."""
        return shards_of(self._parameters)

    def pack(self) -> list[GradientMessage]:
        """Return the gradients, copied into as few messages as possible; zeros in place of None."""
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
        """Return the summed gradient of each leaf; None if no rank has a gradient."""
        sums: list[Tensor | None] = [None] * len(self._parameters)
        for _, flat, places in messages:
            sizes = [shape.numel() for _, shape in places]
            *pieces, flags = flat.split([*sizes, len(places)])
            for (i, shape), piece, ranks in zip(places, pieces, flags.tolist(), strict=True):
                sums[i] = piece.view(shape) if ranks else None
        return sums


def _part(p: Tensor) -> Tensor:
    return torch.zeros_like(p, requires_grad=False) if p.grad is None else p.grad
