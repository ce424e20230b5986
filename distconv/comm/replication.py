"""Values that several ranks hold alike, as they enter and leave the distributed program.

The gradient of a replicated value is the sum over its replicas.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from distconv.comm.collectives import all_reduce_with_grad, apply_along_axes
from distconv.comm.shard_function import ShardFunction
from distconv.grid.interface import Grid


def unreplicate(local: Tensor, grid: Grid, axes: Iterable[str]) -> Tensor:
    """Return a value replicated along `axes` as a plain tensor, its gradient shared equally."""
    shared = apply_along_axes(_Unreplicate, local, grid, axes)
    if shared is local and local.grad_fn is not None:
        notes: Any = local.grad_fn.metadata
        notes[_UNREPLICATED] = True
    return shared


def is_unreplicated(node: Any) -> bool:
    """Return whether `unreplicate` has handed out the result of this node of the graph."""
    return isinstance(node, _Unreplicate._backward_cls) or _UNREPLICATED in node.metadata


def depends_on_unreplicated(x: Tensor) -> bool:
    """Return whether the graph of a plain tensor holds a replicated value that was shared out."""
    seen: set[Any] = set()
    waiting: list[Any] = [x.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or _PLAIN in node.metadata:
            continue
        if isinstance(node, _Unreplicate._backward_cls):
            return True
        seen.add(node)
        waiting.extend(following for following, _ in node.next_functions)
    for node in seen:
        node.metadata[_PLAIN] = True
    return False


_UNREPLICATED = "distconv_out"
"""The mark on a node that its block was handed out as a plain tensor as it is."""


_PLAIN = "distconv_plain"
"""The mark on a node of the graph that nothing before it was handed out by `unreplicate`."""


def replicated_on_paths(roots: Iterable[Tensor], x: Tensor) -> set[bool]:
    """Return, for the paths from `roots` to a plain tensor, whether `replicate` lies on them.

    The gradient of the tensor that `replicate` has returned is whole on every rank already.
    """
    edge = get_gradient_edge(x)
    found, seen = set(), set()
    waiting: list[tuple[Any, bool]] = [
        (root.grad_fn, False) for root in roots if root.grad_fn is not None
    ]
    while waiting:
        node, replicated = step = waiting.pop()
        if step in seen:
            continue
        seen.add(step)
        replicated |= isinstance(node, _Replicate._backward_cls)
        for following, output in node.next_functions:
            if following is edge.node and output == edge.output_nr:
                found.add(replicated)
            elif following is not None:
                waiting.append((following, replicated))
    return found


def replicate(local: Tensor, grid: Grid, axes: Iterable[str]) -> Tensor:
    """Return a plain tensor, equal along `axes`, as a replicated value, whose gradients are added
    up.

    A tensor that requires a gradient gets a node in the graph also where there is nothing to add;
    `replicated_on_paths` finds it by that.
    """
    result: Tensor = _Replicate.apply(local, grid, tuple(axes))
    return result


class _Unreplicate(ShardFunction):
    @staticmethod
    def forward(ctx: Any, local: Tensor, grid: Grid, axes: tuple[str, ...]) -> Tensor:
        ctx.movement = grid, axes
        return _alias(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # The gradient comes from the plain world, which matters to second derivatives.
        grid, axes = ctx.movement
        return replicate(grads[0], grid, axes) / grid.topology.parts(axes), None, None


class _Replicate(ShardFunction):
    @staticmethod
    def forward(ctx: Any, local: Tensor, grid: Grid, axes: tuple[str, ...]) -> Tensor:
        ctx.movement = grid, axes
        return _alias(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # The gradient goes to the plain world.
        return unreplicate(all_reduce_with_grad(grads[0], *ctx.movement), *ctx.movement), None, None


def _alias(tensor: Tensor) -> Tensor:
    """Return the tensor as an autograd function must; view_as() may give it other strides."""
    alias: Tensor = torch.ops.aten.alias(tensor)
    return alias
