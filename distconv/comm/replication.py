"""Values equal on several ranks, as they enter and leave the distributed program.

The gradient of a replicated value is the sum over its replicas.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from distconv.comm.collectives import all_reduce_with_grad, apply_along_axes
from distconv.comm.shard_function import ShardFunction
from distconv.geometry.layout import replicating_axes
from distconv.grid.interface import Grid

HANDED_OUT, REPLICATED, OPERAND = "distconv_out", "distconv_replicated", "distconv_operand"
"""Marks in the metadata of autograd nodes: of plain tensors that leave the distributed program, of
results of `replicate`, and of plain operands of an operator."""


def _marked(x: Tensor, mark: str) -> Tensor:
    if x.grad_fn is not None:
        notes: Any = x.grad_fn.metadata
        notes[mark] = True
    return x


def unreplicate(local: Tensor, grid: Grid, axes: Iterable[str]) -> Tensor:
    """Return a value replicated along `axes` as a plain tensor.

    In the backward pass each of n ranks along `axes` passes on 1/n of the gradient that it gets.
    """
    shared = apply_along_axes(_Unreplicate, local, grid, axes)
    return mark_handed_out(shared) if grid.size > 1 else shared


def mark_handed_out(plain: Tensor) -> Tensor:
    """Return `plain`, a result of `to_local` or its like, with a mark on its autograd node.

    By the mark operators refuse it as a plain operand (see `ownership.origins`).
    """
    return _marked(plain, HANDED_OUT)


def replicate(local: Tensor, grid: Grid, axes: Iterable[str]) -> Tensor:
    """Return `local`, equal on the ranks along `axes`; its gradient is summed over these ranks."""
    return _marked(_Replicate.apply(local, grid, tuple(axes)), REPLICATED)


def as_replicated(plain: Tensor, grid: Grid) -> Tensor:
    """Return a plain tensor, equal on all ranks, as an operand of a distributed operator.

    Its gradient is summed over all ranks of the grid.
    """
    axes = replicating_axes((), grid.topology)
    return _marked(_Replicate.apply(plain, grid, axes), OPERAND)


class _Unreplicate(ShardFunction):
    @staticmethod
    def forward(ctx: Any, local: Tensor, grid: Grid, axes: tuple[str, ...]) -> Tensor:
        ctx.movement = grid, axes
        return alias(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # The gradient comes from plain tensors, which matters to second derivatives.
        grid, axes = ctx.movement
        return replicate(grads[0], grid, axes) / grid.topology.parts(axes), None, None


class _Replicate(ShardFunction):
    @staticmethod
    def forward(ctx: Any, local: Tensor, grid: Grid, axes: tuple[str, ...]) -> Tensor:
        ctx.movement = grid, axes
        return alias(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # The gradient goes to plain tensors.
        return unreplicate(all_reduce_with_grad(grads[0], *ctx.movement), *ctx.movement), None, None


def alias(tensor: Tensor) -> Tensor:
    """Return an alias of a tensor; unlike view_as() this always keeps its strides."""
    alias: Tensor = torch.ops.aten.alias(tensor)
    return alias
