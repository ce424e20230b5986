"""Diagonals of matrices, and their upper and lower triangles."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from distconv.ops.shape.scatter import diagonal_scatter
from distconv.ops.support.arguments import any_type, check_on_meta, normalize_dims
from distconv.ops.support.operands import global_indices, uncut
from distconv.tensor.aliasing import make_view, prepare_write, update_views
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import overwrite


def _triangle(name: str) -> None:
    """Register torch.tril or torch.triu, by `name`; each rank shifts the diagonal to its block."""
    function: Callable[..., Tensor] = getattr(torch, name)
    write: Callable[..., Tensor] = getattr(torch.Tensor, f"{name}_")

    def own(input: DistTensor, diagonal: int) -> int:
        check_on_meta(function, input, diagonal)
        row, column = input.box.start[-2:]
        rows, columns = input.shape[-2:]
        return min(max(diagonal, -rows), columns) + row - column

    @implements(function, getattr(torch.Tensor, name))
    def rule(input: DistTensor, diagonal: int = 0) -> DistTensor:
        shard = function(input.shard, own(input, diagonal))
        return DistTensor(shard, input.shape, input.cuts, input.grid)

    @implements(write)
    def writing(input: DistTensor, diagonal: int = 0) -> DistTensor:
        moved = own(input, diagonal)
        prepare_write(input, f"{name}_")
        write(input.shard, moved)
        update_views(input)
        return input


_triangle("tril")
_triangle("triu")


@implements(torch.diagonal, torch.Tensor.diagonal)
def diagonal(input: DistTensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> DistTensor:
    shape = check_on_meta(torch.diagonal, any_type(input), offset, dim1, dim2)
    pair = normalize_dims((dim1, dim2), input.dim())
    x = uncut(input, pair, "diagonal")
    cuts = (*(axes for d, axes in enumerate(x.cuts) if d not in pair), ())

    def write(base: DistTensor, view: DistTensor) -> None:
        overwrite(base, diagonal_scatter(base, view, offset, *pair), "diagonal")

    return make_view(
        input,
        x.shard.diagonal(offset, *pair),
        shape,
        cuts,
        lambda base: diagonal(base, offset, *pair),
        None if x is input else write,
    )


@implements(torch.diag_embed, torch.Tensor.diag_embed)
def diag_embed(input: DistTensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> DistTensor:
    shape = check_on_meta(torch.diag_embed, any_type(input), offset, dim1, dim2)
    pair = normalize_dims((dim1, dim2), len(shape))
    x = uncut(input, [input.dim() - 1], "diag_embed")
    cuts = list(x.cuts[:-1])
    for d in sorted(pair):
        cuts.insert(d, ())
    return DistTensor(torch.diag_embed(x.shard, offset, *pair), shape, tuple(cuts), x.grid)


@implements(torch.Tensor.fill_diagonal_)
def fill_diagonal_(input: DistTensor, fill_value: float, wrap: bool = False) -> DistTensor:
    check_on_meta(torch.Tensor.fill_diagonal_, input, fill_value, wrap)
    prepare_write(input, "fill_diagonal_")
    first, *others = global_indices(input)
    if wrap and input.dim() == 2:
        first = first % (input.shape[1] + 1)
    mask = torch.ones_like(input.shard, dtype=torch.bool)
    for positions in others:
        mask &= positions == first
    input.shard.masked_fill_(mask, fill_value)
    update_views(input)
    return input
