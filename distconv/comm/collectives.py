"""Sums and copies among the ranks along grid axes; some can be differentiated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from distconv.comm.packing import resolved_contiguous
from distconv.comm.shard_function import ShardFunction
from distconv.geometry.topology import AXES
from distconv.grid.interface import Grid


def all_reduce_with_grad(local: Tensor, grid: Grid, axes: Iterable[str]) -> Tensor:
    """Return the sum of `local` over the ranks along `axes`, which all call it; differentiable."""
    return apply_along_axes(_AllReduce, local, grid, axes)


def all_gather_with_grad(local: Tensor, grid: Grid, axes: Iterable[str]) -> Tensor:
    """Stack `local` of all ranks along `axes`, which all call it; differentiable.

    The ranks are in the order of the blocks of a dimension cut over `axes`: the first axis is the
    slowest.
    """
    axes = tuple(axes)
    if grid.topology.parts(axes) == 1:
        return local.unsqueeze(0)
    gathered = apply_along_axes(_AllGather, local, grid, axes)
    by_rank = sorted(axes, key=AXES.index)
    if axes == tuple(by_rank):
        return gathered
    each = gathered.unflatten(0, [grid.topology.extent(axis) for axis in by_rank])
    order = [by_rank.index(axis) for axis in axes]
    return each.permute(*order, *range(len(axes), each.dim())).flatten(0, len(axes) - 1)


def apply_along_axes(
    function: type[ShardFunction], local: Tensor, grid: Grid, axes: Iterable[str]
) -> Tensor:
    """Return `function.apply(local, grid, axes)`, or `local` if there is one rank along `axes`."""
    axes = tuple(axes)
    if grid.topology.parts(axes) == 1:
        return local
    result: Tensor = function.apply(local, grid, axes)
    return result


def all_reduce(local: Tensor, grid: Grid, axes: Iterable[str]) -> Tensor:
    """Return the sum of `local` over the ranks along `axes`, which all call it; no gradient."""
    total = resolved_contiguous(local.detach()).clone(memory_format=torch.contiguous_format)
    all_reduce_(total, grid, axes)
    return total


def all_reduce_(tensor: Tensor, grid: Grid, axes: Iterable[str]) -> None:
    """Sum a contiguous tensor in place over the ranks along `axes`, which all call it."""
    grid.transport.all_reduce(tensor, grid.communicator(axes)).wait()


def all_reduce_coalesced(
    tensors: Sequence[Tensor], grid: Grid, axes: Iterable[str]
) -> list[Tensor]:
    """Return the sum of each tensor over the ranks along `axes`, without gradient.

    These ranks all call it. One message carries all tensors of a type. With one rank along `axes`
    the tensors themselves are returned.
    """
    sums, axes = list(tensors), tuple(axes)
    if grid.topology.parts(axes) == 1:
        return sums
    by_type: dict[torch.dtype, list[int]] = defaultdict(list)
    for i, x in enumerate(tensors):
        by_type[x.dtype].append(i)
    for numbers in by_type.values():
        flat = torch.cat([tensors[i].detach().reshape(-1) for i in numbers])
        all_reduce_(flat, grid, axes)
        pieces = flat.split([tensors[i].numel() for i in numbers])
        for i, piece in zip(numbers, pieces, strict=True):
            sums[i] = piece.view(tensors[i].shape)
    return sums


def all_gather(local: Tensor, grid: Grid, axes: Iterable[str]) -> Tensor:
    """Stack `local` of all ranks along `axes`, which all call it, in rank order; no gradient."""
    return grid.transport.all_gather(resolved_contiguous(local.detach()), grid.communicator(axes))


def broadcast(tensor: Tensor, grid: Grid, axes: Iterable[str] = AXES) -> None:
    """Overwrite `tensor` by that of the first of the ranks along `axes`, which all call it."""
    axes = tuple(axes)
    if not tensor.numel() or grid.topology.parts(axes) == 1:
        return
    message = resolved_contiguous(tensor.detach())
    grid.transport.broadcast(message, grid.communicator(axes))
    if message.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(message)


class _AllReduce(ShardFunction):
    @staticmethod
    def forward(ctx: Any, local: Tensor, grid: Grid, axes: tuple[str, ...]) -> Tensor:
        ctx.movement = grid, axes
        return all_reduce(local, grid, axes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _AllReduce.apply(grads[0], *ctx.movement), None, None


class _AllGather(ShardFunction):
    @staticmethod
    def forward(ctx: Any, local: Tensor, grid: Grid, axes: tuple[str, ...]) -> Tensor:
        ctx.movement = grid, axes
        return all_gather(local, grid, axes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grid, axes = ctx.movement
        return _AllReduce.apply(grads[0], grid, axes)[grid.communicator(axes).rank], None, None
