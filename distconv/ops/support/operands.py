"""Bringing the operands of an operator to layouts that fit together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distconv.geometry.layout import (
    Box,
    Cuts,
    Shape,
    cuts_of_broadcast,
    cutting_axes,
    operand_cuts,
    rank_box,
)
from distconv.geometry.topology import Topology
from distconv.grid.interface import Grid
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.recording import common_grid as common_grid
from distconv.tensor.redistribution import redistribute


class Placement(NamedTuple):
    """The shape, cuts, type and rank of a tensor, from which plans are derived and cached."""

    shape: Shape
    cuts: Cuts
    topology: Topology
    rank: int
    dtype: torch.dtype

    @classmethod
    def of(cls, x: DistTensor) -> Placement:
        """Return the placement of `x`."""
        grid = x.grid
        return cls(tuple(x.shape), x.cuts, grid.topology, grid.rank, x.shard.dtype)


def as_distributed(x: Tensor, grid: Grid) -> DistTensor:
    """Return `x` as a DistTensor; a plain tensor, equal on all ranks, is whole on each of them."""
    if isinstance(x, DistTensor):
        return x
    return DistTensor(x, x.shape, ((),) * x.dim(), grid)


def shard_of(x: Any) -> Any:
    """Return the shard of a DistTensor; other values are returned unchanged."""
    return x.shard if isinstance(x, DistTensor) else x


def gather_whole(x: Any, operator: str) -> Any:
    """Return a DistTensor in full, as a plain tensor; other values are returned unchanged.

    All ranks call it. `operator` is the called function, for the records of redistributions.
    """
    if not isinstance(x, DistTensor):
        return x
    return redistribute(x, ((),) * x.dim(), operator).shard


def uncut(x: DistTensor, dimensions: Iterable[int], operator: str) -> DistTensor:
    """Return `x` with these dimensions whole on every rank; all ranks call it.

    `operator` is the called function, for the records of redistributions.
    """
    chosen = set(dimensions)
    return redistribute(x, tuple(() if d in chosen else a for d, a in enumerate(x.cuts)), operator)


def local_operand(x: Any, shape: Shape, cuts: Cuts, grid: Grid, operator: str) -> Any:
    """Return this rank's block of an operand that is broadcast to `shape` cut by `cuts`.

    Numbers are returned unchanged, plain tensors (equal on all ranks) are sliced, DistTensors are
    redistributed if their cuts differ; `operator` is the called function, for the records.
    """
    if not isinstance(x, Tensor):
        return x
    if isinstance(x, DistTensor) and x.cuts == cuts and tuple(x.shape) == shape:
        return x.shard
    own = operand_cuts(tuple(x.shape), shape, cuts)
    if isinstance(x, DistTensor):
        return x.shard if x.cuts == own else redistribute(x, own, operator).shard
    if not cutting_axes(own):
        return x
    return x[box_on_rank(x.shape, own, grid).slices]


def broadcast_shape(name: str, tensors: Sequence[Tensor]) -> Shape:
    """Return the shape to which the tensors' global shapes broadcast; raise if they do not.

    `name` is the called function, for the error.
    """
    try:
        return _broadcast(tuple(x.shape for x in tensors))
    except RuntimeError:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise RuntimeError(
            f"{name}: the global shapes {shapes} do not broadcast. A plain tensor takes part with "
            "the global shape, equal on all ranks; a rank's own block becomes distributed by "
            "DistTensor.from_local"
        ) from None


@lru_cache(maxsize=4096)
def _broadcast(shapes: tuple[Shape, ...]) -> Shape:
    return tuple(torch.broadcast_shapes(*shapes))


def broadcast_cuts(operands: Sequence[DistTensor], shape: Shape) -> Cuts:
    """Return the cuts of a result of `shape` to which operands are broadcast.

    Each dimension is cut as in the largest operand that cuts it and is not broadcast along it, over
    axes that no other dimension uses. Of operands of equal size the first decides.
    """
    return cuts_of_broadcast(tuple((tuple(x.shape), x.cuts) for x in operands), shape)


def box_on_rank(shape: Sequence[int], cuts: Cuts, grid: Grid) -> Box:
    """Return the box that this rank holds of a tensor of global `shape` cut by `cuts`."""
    return rank_box(tuple(shape), cuts, grid.topology, grid.rank)


def filled_block(block: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return ones in place of a block without elements, of `shape` or with sizes 0 replaced by 1.

    They depend on `block` in the autograd graph. Ranks without elements compute with them, so that
    all ranks have the same graph. For empty tensors torch would leave out gradients, together with
    the exchanges that other ranks wait for.
    """
    ones = block.new_ones([max(n, 1) for n in block.shape] if shape is None else tuple(shape))
    return ones + block.sum().to(block.dtype)


def empty_block(buffer: Tensor, shape: Shape) -> Tensor:
    """Return an empty block of `shape` that depends on `buffer` in the autograd graph."""
    return buffer.reshape(-1)[:0].reshape(shape)


def accumulation_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which to add up many elements: float32 for half types, else `dtype`."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def to_accumulation_type(x: Tensor) -> Tensor:
    """Return `x` in the type of `accumulation_type`."""
    return in_type(x, accumulation_type(x.dtype))


def in_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` in type `dtype`; `x` itself if it has the type, without a call of Tensor.to."""
    return x if x.dtype == dtype else x.to(dtype)


def check_same_types(name: str, *tensors: Tensor | None) -> None:
    """Raise RuntimeError on every rank if types differ; torch skips blocks without elements.

    `name` is the called function, for the error.
    """
    given = [t for t in tensors if t is not None]
    if len({t.dtype for t in given}) > 1:
        raise RuntimeError(
            f"{name}: input, weight and bias have the types "
            f"{', '.join(str(t.dtype) for t in given)}; convert them to one"
        )


def distributed_input(name: str, input: Tensor, *parameters: Tensor | None) -> DistTensor:
    """Return the input as a DistTensor; raise if parameters have another type or grid.

    `name` is the called function, for errors.
    """
    x = as_distributed(input, common_grid(name, (input, *parameters)))
    check_same_types(name, x, *parameters)
    return x


def global_indices(x: DistTensor) -> list[Tensor]:
    """Return this rank's global indices along each dimension, shaped to broadcast to its block."""
    box = x.box
    return [
        torch.arange(start, stop, device=x.device).view(-1, *(1,) * (x.dim() - 1 - d))
        for d, (start, stop) in enumerate(zip(box.start, box.stop, strict=True))
    ]


def global_numbers(x: DistTensor, dims: int) -> Tensor:
    """Return the row-major numbers of this rank's positions in the first `dims` dimensions."""
    box = x.box
    numbers = torch.zeros((), dtype=torch.int64, device=x.device)
    for d in range(dims):
        along = torch.arange(box.start[d], box.stop[d], device=x.device)
        numbers = numbers.unsqueeze(-1) * x.shape[d] + along
    return numbers


def unravel(numbers: Tensor, shape: Sequence[int]) -> list[Tensor]:
    """Return the coordinates, by dimension, of row-major numbers in a tensor of `shape`.

    Negative numbers give coordinates without meaning.
    """
    coordinates: list[Tensor] = []
    for size in reversed(shape):
        coordinates.insert(0, numbers % size)
        numbers = numbers // size
    return coordinates
