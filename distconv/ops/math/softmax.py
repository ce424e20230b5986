"""Softmax and its logarithm, along cut dimensions too, without moving the elements.

Where the dimension is cut, the ranks along it exchange two numbers for each row: the largest
element, and the sum of the exponentials.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.comm.collectives import all_gather, all_reduce_with_grad
from distconv.grid.interface import Grid
from distconv.ops.support.argument_forms import normalize_dim
from distconv.ops.support.merged import works_along
from distconv.ops.support.operands import uncut
from distconv.ops.support.types import to_accumulation_type
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor


def _implicit(ndim: int) -> int:
    """Return the dimension that torch takes for a softmax without one."""
    return 0 if ndim in (0, 1, 3) else 1


def _softmax(function: Callable[..., Tensor], *others: Callable[..., Tensor]) -> None:
    name = function.__name__

    @implements(function, *others)
    @works_along(reduces=False)
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
        d = normalize_dim(_implicit(input.dim()) if dim is None else dim, input.dim())
        x, axes = input, input.cuts[d] if input.dim() else ()
        if axes and input.numel():
            shard = _along_cut(name, input.shard.to(kind), d, input.grid, axes)
        else:
            x = uncut(input, [d], name)
            shard = function(x.shard, d, dtype=dtype)
        return DistTensor(shard, x.shape, x.cuts, x.grid)


def _along_cut(name: str, x: Tensor, d: int, grid: Grid, axes: tuple[str, ...]) -> Tensor:
    """Return the block of a softmax along dimension `d`, cut over `axes`, whose ranks call it."""
    wide = to_accumulation_type(-x if name == "softmin" else x)
    here = wide.detach()
    if not here.shape[d]:
        here = here.new_full((*here.shape[:d], 1, *here.shape[d + 1 :]), -torch.inf)
    # It cancels out of the result, and so has no gradient.
    largest = all_gather(here.amax(d, keepdim=True), grid, axes).amax(0)
    shifted = wide - largest
    powers = shifted.exp()
    total = all_reduce_with_grad(powers.sum(d, keepdim=True), grid, axes)
    result = shifted - total.log() if name == "log_softmax" else powers / total
    return result.to(x.dtype)


_softmax(F.softmax, torch.softmax, torch.Tensor.softmax, torch.special.softmax)
_softmax(F.log_softmax, torch.log_softmax, torch.Tensor.log_softmax, torch.special.log_softmax)
_softmax(F.softmin)
