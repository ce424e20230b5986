"""Norms of many tensors, some of them cut over ranks, in few messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from distconv.comm.collectives import all_gather
from distconv.geometry.layout import cutting_axes
from distconv.grid.interface import Grid
from distconv.ops.support.operands import shard_of
from distconv.tensor.dist_tensor import DistTensor


def tensor_norms(tensors: Sequence[Tensor], order: float = 2.0) -> list[Tensor]:
    """Return the norm of each tensor, as plain tensors without dimensions, outside autograd.

    The norm of a DistTensor is of the whole tensor, the same on all ranks, which call it together;
    one
    message serves all tensors cut over the same axes of a grid. For plain tensors nothing is sent.
    """
    with torch.no_grad():
        norms = [_norm(shard_of(x), order) for x in tensors]
        cut: dict[tuple[Grid, tuple[str, ...], torch.dtype], list[int]] = defaultdict(list)
        for i, x in enumerate(tensors):
            if isinstance(x, DistTensor):
                cut[x.grid, cutting_axes(x.cuts), norms[i].dtype].append(i)
        for (grid, axes, _), numbers in cut.items():
            blocks = all_gather(torch.stack([norms[i] for i in numbers]), grid, axes)
            whole = torch.linalg.vector_norm(blocks, order, dim=0)
            for i, norm in zip(numbers, whole.unbind(), strict=True):
                norms[i] = norm
    return norms


def _norm(block: Tensor, order: float) -> Tensor:
    # Blocks may be empty, and torch has no maximum of those.
    if not block.numel():
        return block.new_zeros((), dtype=block.dtype.to_real())
    return torch.linalg.vector_norm(block, order)
