"""Positions of a block's elements in the global tensor: by dimension, and in row-major order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distconv.tensor.dist_tensor import DistTensor


def global_indices(x: DistTensor) -> list[Tensor]:
    """Return the global indices of this rank's block along each dimension, which broadcast to it.

    No communication.
    """
    box = x.box
    return [
        torch.arange(start, stop, device=x.device).view(-1, *(1,) * (x.dim() - 1 - d))
        for d, (start, stop) in enumerate(zip(box.start, box.stop, strict=True))
    ]


def global_numbers(x: DistTensor, dims: int) -> Tensor:
    """Return the row-major numbers of this rank's positions in the first `dims` dimensions.

    No communication.
    """
    box = x.box
    numbers = torch.zeros((), dtype=torch.int64, device=x.device)
    for d in range(dims):
        along = torch.arange(box.start[d], box.stop[d], device=x.device)
        numbers = numbers.unsqueeze(-1) * x.shape[d] + along
    return numbers


def unravel(numbers: Tensor, shape: Sequence[int]) -> list[Tensor]:
    """Return the coordinates, by dimension, of row-major numbers in a tensor of this shape.

    Negative numbers give coordinates without meaning.
    """
    coordinates: list[Tensor] = []
    for size in reversed(shape):
        coordinates.insert(0, numbers % size)
        numbers = numbers // size
    return coordinates
