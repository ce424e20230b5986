"""Functions that work along some dimensions, and treat all others element by element.

The dimensions they work along are made whole on every rank first, which is recorded as a
redistribution; the others stay cut. If the values of an argument are bad, such as a singular
matrix, the rank that holds them raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from distconv.geometry.layout import Cuts, Shape, cuts_of_broadcast
from distconv.grid.interface import Grid
from distconv.ops.support.metadata_checks import check_on_meta
from distconv.ops.support.operands import (
    as_distributed,
    box_on_rank,
    common_grid,
    filled_block,
    local_operand,
    uncut,
)
from distconv.tensor.dist_tensor import DistTensor


def _distributed(result: Any, shapes: Any, cuts_of: Callable[[Shape], Cuts], grid: Grid) -> Any:
    """Return one block, or a tuple of blocks, as DistTensors of these global shapes.

    `cuts_of` takes the global shape of a result and returns its cuts. A rank without elements has
    computed with substitutes (`filled_block`, `_matrices`); its results are cropped to no elements.
    """
    if not isinstance(result, Tensor):
        pairs = zip(result, shapes, strict=True)
        return type(result)([_distributed(*pair, cuts_of, grid) for pair in pairs])
    cuts = cuts_of(shapes)
    own = box_on_rank(shapes, cuts, grid).shape
    return DistTensor(result[tuple(map(slice, own))] if 0 in own else result, shapes, cuts, grid)


def apply_along(
    function: Callable[..., Any],
    name: str,
    input: DistTensor,
    dims: Sequence[int],
    *args: Any,
    dropped: Sequence[int] = (),
    **kwargs: Any,
) -> Any:
    """Return `function(input, *args, **kwargs)`, which works along `dims`.

    Its results have the dimensions of the input without those in `dropped`, and perhaps further
    ones after them. `name` is the called function, for the records of redistributions.
    """
    shapes = check_on_meta(function, input, *args, **kwargs)
    x = uncut(input, dims, name)
    kept = tuple(axes for d, axes in enumerate(x.cuts) if d not in dropped)

    def cuts_of(shape: Shape) -> Cuts:
        return (*kept, *((),) * (len(shape) - len(kept)))

    block = filled_block(x.shard) if 0 in x.shard.shape and input.numel() else x.shard
    return _distributed(function(block, *args, **kwargs), shapes, cuts_of, x.grid)


def apply_to_batches(
    function: Callable[..., Any],
    name: str,
    operands: Sequence[Tensor],
    inner: Sequence[int],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return `function(*operands, *args, **kwargs)`, which works along the last dimensions of each.

    `inner` is the number of these dimensions for each operand. The leading dimensions are broadcast
    against each other, and come first in the results. `name` is the called function, for errors and
    for the records of redistributions.
    """
    grid = common_grid(name, operands)
    shapes = check_on_meta(function, *operands, *args, **kwargs)
    given = [as_distributed(x, grid) for x in operands]
    leading = [
        (tuple(x.shape[: x.dim() - n]), x.cuts[: x.dim() - n])
        for x, n in zip(given, inner, strict=True)
    ]
    batch: Shape = tuple(torch.broadcast_shapes(*(shape for shape, _ in leading)))
    cuts = cuts_of_broadcast(tuple(leading), batch)
    blocks = [
        local_operand(x, (*batch, *x.shape[x.dim() - n :]), (*cuts, *((),) * n), grid, name)
        for x, n in zip(operands, inner, strict=True)
    ]

    def cuts_of(shape: Shape) -> Cuts:
        return (*cuts, *((),) * (len(shape) - len(batch)))

    if prod(batch) and 0 in box_on_rank(batch, cuts, grid).shape:
        blocks = [_matrices(x, n) for x, n in zip(blocks, inner, strict=True)]
    return _distributed(function(*blocks, *args, **kwargs), shapes, cuts_of, grid)


def _matrices(block: Tensor, inner: int) -> Tensor:
    """Return `block`, or valid operands in place of a block without elements.

    These are identity matrices if `inner`, the number of dimensions along which the function works,
    is 2, as matrices of ones may have no inverse; and ones otherwise.
    """
    if block.numel():
        return block
    # Matrices without rows or columns stay so, as on ranks that have some.
    samples, own = block.shape[:-inner], block.shape[-inner:]
    filled = filled_block(block, [max(n, 1) for n in samples] + list(own))
    if inner < 2:
        return filled
    return filled * torch.eye(*block.shape[-2:], dtype=block.dtype, device=block.device)
