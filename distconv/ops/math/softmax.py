"""Softmax and its logarithm, also along partitioned dimensions, without sending the elements.

A row is the elements along the dimension. If the dimension is partitioned, the ranks gather two
numbers for each row of each block: the largest element, and the sum of the exponentials. The
backward pass sums one number for each row over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.comm.collectives import all_gather, all_reduce_with_grad
from distconv.comm.packing import has_channels_last
from distconv.geometry.layout import cutting_axes
from distconv.grid.interface import Grid
from distconv.ops.support.arguments import normalize_dim
from distconv.ops.support.dimensions import works_along
from distconv.ops.support.operands import to_accumulation_type, uncut
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor
from distconv.torch_private import ShardFunction


def _softmax(function: Callable[..., Tensor], *others: Callable[..., Tensor]) -> None:
    name = function.__name__

    @implements(function, *others)
    def rule(
        input: DistTensor,
        dim: int | None = None,
        _stacklevel: int = 3,
        dtype: torch.dtype | None = None,
    ) -> DistTensor:
        if isinstance(_stacklevel, torch.dtype):  # torch.softmax(input, dim, dtype)
            dtype = _stacklevel
        kind = dtype or input.dtype
        if not kind.is_floating_point and input.numel():
            raise NotImplementedError(f"{name}: not implemented for {kind}; pass a floating dtype=")
        implicit = 0 if input.dim() in (0, 1, 3) else 1  # as in torch
        return along(input, normalize_dim(implicit if dim is None else dim, input.dim()), dtype)

    @works_along(reduces=False)
    def along(input: DistTensor, dim: int | list[int], dtype: torch.dtype | None) -> DistTensor:
        """Return the softmax along `dim`, or along several adjacent dimensions together."""
        dims = [dim] if isinstance(dim, int) else dim
        axes = cutting_axes(input.cuts[d] for d in dims) if input.dim() and input.numel() else ()
        x = input if axes else uncut(input, dims, name)
        rows = x.shard.flatten(dims[0], dims[-1]) if len(dims) > 1 else x.shard
        if axes:
            made = _along_cut(name, rows.to(dtype or x.dtype), dims[0], x.grid, axes)
        else:
            made = function(rows, dims[0], dtype=dtype)
        return DistTensor(made.reshape(x.shard.shape), x.shape, x.cuts, x.grid)


def _along_cut(name: str, x: Tensor, d: int, grid: Grid, axes: tuple[str, ...]) -> Tensor:
    """Return this rank's block of a softmax along a partitioned dimension. Collective over `axes`.

    `name` is "softmax", "log_softmax" or "softmin"; `x` is this rank's block of the input, whose
    dimension `d` is partitioned over `axes`.
    """
    wide = to_accumulation_type(-x if name == "softmin" else x)
    last = has_channels_last(wide)
    if last:  # torch's kernels work along dimensions in the order of memory
        wide, d = wide.movedim(1, -1), (x.dim() if d == 1 else d) - (d > 0)
    result: Tensor = _AlongCut.apply(wide, name == "log_softmax", d, last, grid, axes)
    return (result.movedim(-1, 1) if last else result).to(x.dtype)


class _AlongCut(ShardFunction):
    """Softmax along a partitioned dimension: torch's softmax of each block, with rescaled rows.

    Each rank sends for every row of its block the largest element m and the sum of exp(x - m)
    (Milakov and Gimelshein, Online normalizer calculation for softmax, 2018). Messages are in the
    order channels first, because blocks of other ranks may have another memory format.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, logarithm: bool, d: int, last: bool, grid: Grid, axes: tuple[str, ...]
    ) -> Tensor:
        y = x.log_softmax(d) if logarithm else x.softmax(d)
        if x.shape[d]:
            largest, top = x.amax(d, keepdim=True), y.amax(d, keepdim=True)
            total = (-top).exp() if logarithm else top.reciprocal()
            # If a block has only -inf in a row, torch's softmax of the row is nan.
            void = largest == -torch.inf
            if not void.is_cpu or void.any():
                total.masked_fill_(void, 0)
                y.masked_fill_(void, -torch.inf if logarithm else 0)
        else:
            total = x.new_zeros(*x.shape[:d], 1, *x.shape[d + 1 :])
            largest = total - torch.inf
        own = torch.stack([largest, total])
        if last:
            blocks = all_gather(own.movedim(-1, 2), grid, axes).movedim(3, -1)
        else:
            blocks = all_gather(own, grid, axes)
        of_all = blocks[:, 0].amax(0)
        whole = (blocks[:, 1] * (blocks[:, 0] - of_all).exp()).sum(0)
        if logarithm:
            y.sub_(of_all - largest + whole.log() - total.log())
        else:
            y.mul_((largest - of_all).exp() * total / whole)
        ctx.save_for_backward(y)
        ctx.movement = logarithm, d, last, grid, axes
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (y,), (dy,) = ctx.saved_tensors, grads
        logarithm, d, last, *movement = ctx.movement
        own = dy if logarithm else y * dy
        total = own.sum(d, keepdim=True)
        if last:
            total = all_reduce_with_grad(total.movedim(-1, 1), *movement).movedim(1, -1)
        else:
            total = all_reduce_with_grad(total, *movement)
        dx = own.addcmul(y.exp() if logarithm else y, total, value=-1)
        return dx, None, None, None, None, None


_softmax(F.softmax, torch.softmax, torch.Tensor.softmax, torch.special.softmax)
_softmax(F.log_softmax, torch.log_softmax, torch.Tensor.log_softmax, torch.special.log_softmax)
_softmax(F.softmin)
