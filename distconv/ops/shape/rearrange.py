"""Reordering and repetition of elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distconv.geometry.index_maps import IndexMap, Reversed, Rolled, Same
from distconv.ops.shape.indexing import cat
from distconv.ops.shape.reshape import permute, unsqueeze
from distconv.ops.support.argument_forms import (
    as_sizes,
    normalize_dim,
    normalize_dims,
    takes_sequence,
)
from distconv.ops.support.metadata_checks import any_type, check_on_meta
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import gather_inputs
from distconv.tensor.whole_numbers import whole_numbers


@implements(torch.flip, torch.Tensor.flip)
@takes_sequence("dims")
def flip(input: DistTensor, *dims: Any) -> DistTensor:
    named = as_sizes(dims)
    chosen = normalize_dims(named, input.dim()) if named else ()
    needs = [Reversed() if d in chosen and axes else Same() for d, axes in enumerate(input.cuts)]
    buffer = gather_inputs(input, needs, input.cuts, "flip")
    return DistTensor(buffer.flip(chosen), input.shape, input.cuts, input.grid)


@implements(torch.roll, torch.Tensor.roll)
def roll(
    input: DistTensor, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None
) -> Tensor:
    if dims is None or (isinstance(dims, (tuple, list)) and not dims):
        return torch.roll(input.flatten(), shifts, 0).view(tuple(input.shape))
    amounts, chosen = whole_numbers(shifts, "shifts"), whole_numbers(dims, "dims")
    if len(amounts) != len(chosen):
        raise RuntimeError(
            f"roll: {len(amounts)} shifts for {len(chosen)} dimensions; give one for each"
        )
    total = [0] * input.dim()
    for shift, d in zip(amounts, chosen, strict=True):
        total[normalize_dim(d, input.dim())] += shift
    needs: list[IndexMap] = [
        Rolled(shift) if shift and axes and n else Same()
        for shift, axes, n in zip(total, input.cuts, input.shape, strict=True)
    ]
    buffer = gather_inputs(input, needs, input.cuts, "roll")
    rest = [d for d, need in enumerate(needs) if total[d] and isinstance(need, Same)]
    if rest:
        buffer = buffer.roll([total[d] for d in rest], rest)
    elif buffer is input.shard:
        buffer = buffer.clone()
    return DistTensor(buffer, input.shape, input.cuts, input.grid)


@implements(torch.tile, torch.Tensor.tile)
@takes_sequence("dims")
def tile(input: DistTensor, *dims: Any) -> DistTensor:
    times = as_sizes(dims)
    return repeat(input, (1,) * (input.dim() - len(times)) + times)


@implements(torch.Tensor.repeat)
@takes_sequence("repeats")
def repeat(input: DistTensor, *repeats: Any) -> DistTensor:
    times = as_sizes(repeats)
    check_on_meta(torch.Tensor.repeat, any_type(input), times)
    x = input
    while x.dim() < len(times):
        x = unsqueeze(x, 0)
    for d, n in enumerate(times):
        if n == 0:
            x = x.narrow(d, 0, 0)  # type: ignore[assignment]
        elif n > 1:
            x = cat([x] * n, d)
    return x if max(times, default=1) > 1 else x.clone()  # type: ignore[return-value]


@implements(torch.movedim, torch.Tensor.movedim, torch.moveaxis, torch.Tensor.moveaxis)
def movedim(
    input: DistTensor, source: int | Sequence[int], destination: int | Sequence[int]
) -> DistTensor:
    numbered = torch.empty(tuple(range(input.dim())), device="meta")
    moved = torch.movedim(numbered, source, destination)  # type: ignore[arg-type]
    return permute(input, tuple(moved.shape))


@implements(torch.t, torch.Tensor.t, torch.Tensor.T.__get__)  # type: ignore[attr-defined]
def t(input: DistTensor) -> DistTensor:
    if input.dim() > 2:
        raise RuntimeError(f"t: expected at most 2 dimensions, got {input.dim()}; use permute")
    return permute(input, list(reversed(range(input.dim()))))
