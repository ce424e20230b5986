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
from distconv.torch_private import node_type


def unreplicate(local: Tensor, grid: Grid, axes: Iterable[str]) -> Tensor:
    """Return a value replicated along `axes` as a plain tensor; its gradient is shared equally."""
    shared = apply_along_axes(_Unreplicate, local, grid, axes)
    return mark_handed_out(local) if shared is local and grid.size > 1 else shared


def mark_handed_out(plain: Tensor) -> Tensor:
    """Mark the autograd node of a plain tensor that leaves the distributed program; return it."""
    if plain.grad_fn is not None:
        notes: Any = plain.grad_fn.metadata
        notes[_UNREPLICATED] = True
    return plain


def is_unreplicated(node: Any) -> bool:
    """Return whether an autograd node's result left the distributed program as a plain tensor."""
    return isinstance(node, node_type(_Unreplicate)) or _UNREPLICATED in node.metadata


_UNREPLICATED = "distconv_out"
"""The mark on an autograd node whose block was handed out as a plain tensor unchanged."""


def replicate(local: Tensor, grid: Grid, axes: Iterable[str]) -> Tensor:
    """Return `local`, equal on the ranks along `axes`; its gradient is summed over these ranks."""
    result: Tensor = _Replicate.apply(local, grid, tuple(axes))
    return result


def is_replicated(node: Any) -> bool:
    """Return whether `replicate` made the result of this autograd node."""
    return type(node) is node_type(_Replicate)


def as_replicated(plain: Tensor, grid: Grid) -> Tensor:
    """Return a plain tensor, equal on all ranks, as an operand of a distributed operator.

    Its gradient is summed over all ranks of the grid. `is_entry` recognises its node.
    """
    result: Tensor = _Enter.apply(plain, grid, replicating_axes((), grid.topology))
    return result


def is_entry(node: Any) -> bool:
    """Return whether `as_replicated` made the result of this autograd node."""
    return isinstance(node, node_type(_Enter))


class _Unreplicate(ShardFunction):
    @staticmethod
    def forward(ctx: Any, local: Tensor, grid: Grid, axes: tuple[str, ...]) -> Tensor:
        ctx.movement = grid, axes
        return _alias(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # The gradient comes from plain tensors, which matters to second derivatives.
        grid, axes = ctx.movement
        return replicate(grads[0], grid, axes) / grid.topology.parts(axes), None, None


class _Replicate(ShardFunction):
    @staticmethod
    def forward(ctx: Any, local: Tensor, grid: Grid, axes: tuple[str, ...]) -> Tensor:
        ctx.movement = grid, axes
        return _alias(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # The gradient goes to plain tensors.
        return unreplicate(all_reduce_with_grad(grads[0], *ctx.movement), *ctx.movement), None, None


class _Enter(_Replicate):
    """`_Replicate` for one operand of an operator; `is_entry` recognises it by its own type."""


def _alias(tensor: Tensor) -> Tensor:
    """Return an alias of a tensor; unlike view_as() this always keeps its strides."""
    alias: Tensor = torch.ops.aten.alias(tensor)
    return alias
