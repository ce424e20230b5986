"""Several tensors brought to one shape, or joined to one tensor, by the rules for `cat`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distconv.ops.shape.indexing import cat, stack
from distconv.ops.shape.lookup import index_select
from distconv.ops.shape.pad import pad
from distconv.ops.support.metadata_checks import any_type, check_on_meta
from distconv.ops.support.operands import as_distributed, broadcast_shape, common_grid
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor


def _distributed(name: str, tensors: Sequence[Tensor]) -> list[DistTensor]:
    grid = common_grid(name, tensors)
    return [as_distributed(x, grid) for x in tensors]


@implements(torch.broadcast_tensors)
def broadcast_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return all tensors in the shape of their broadcast."""
    shape = broadcast_shape("broadcast_tensors", tensors)
    return tuple(x.expand(shape) for x in _distributed("broadcast_tensors", tensors))


def _at_least(function: Callable[..., Any], grown: Callable[[Tensor], Tensor]) -> None:
    @implements(function)
    def rule(*tensors: Tensor) -> Any:
        results = tuple(grown(x) for x in _distributed(function.__name__, tensors))
        return results if len(tensors) > 1 else results[0]


def _as_vector(x: Tensor) -> Tensor:
    return x if x.dim() else x.unsqueeze(0)


def _as_matrix(x: Tensor) -> Tensor:
    return x if x.dim() > 1 else _as_vector(x).unsqueeze(0)


def _as_volume(x: Tensor) -> Tensor:
    return x if x.dim() > 2 else _as_matrix(x).unsqueeze(-1)


_at_least(torch.atleast_1d, _as_vector)
_at_least(torch.atleast_2d, _as_matrix)
_at_least(torch.atleast_3d, _as_volume)


@implements(torch.hstack)
def hstack(tensors: Sequence[Tensor]) -> DistTensor:
    """Join tensors side by side: along dimension 1, or 0 of vectors."""
    pieces = [_as_vector(x) for x in tensors]
    return cat(pieces, 0 if pieces[0].dim() == 1 else 1)


@implements(torch.vstack, torch.row_stack)
def vstack(tensors: Sequence[Tensor]) -> DistTensor:
    """Join tensors one below the other, vectors as rows."""
    return cat([_as_matrix(x) for x in tensors], 0)


@implements(torch.dstack)
def dstack(tensors: Sequence[Tensor]) -> DistTensor:
    """Join tensors one behind the other, along dimension 2."""
    return cat([_as_volume(x) for x in tensors], 2)


@implements(torch.column_stack)
def column_stack(tensors: Sequence[Tensor]) -> DistTensor:
    """Join tensors side by side, vectors as columns."""
    return cat([x if x.dim() > 1 else _as_vector(x).unsqueeze(1) for x in tensors], 1)


@implements(torch.block_diag)
def block_diag(*tensors: Tensor) -> DistTensor:
    """Return a matrix of which the tensors, vectors as rows, are the blocks on the diagonal."""
    if any(x.dim() > 2 for x in tensors):
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise RuntimeError(f"block_diag: expected at most 2 dimensions, got {shapes}")
    blocks = [_as_matrix(x) for x in _distributed("block_diag", tensors)]
    total, before, rows = sum(x.shape[1] for x in blocks), 0, []
    for x in blocks:
        assert isinstance(x, DistTensor)
        rows.append(pad(x, (before, total - before - x.shape[1])))
        before += x.shape[1]
    return cat(rows, 0)


@implements(torch.meshgrid)
def meshgrid(*tensors: Tensor, indexing: str | None = None) -> tuple[Tensor, ...]:
    """Return the coordinates of a grid's points, each along a dimension of its own."""
    shapes = check_on_meta(torch.meshgrid, *tensors, indexing=indexing or "ij")
    order = list(range(len(tensors)))
    if indexing == "xy" and len(tensors) > 1:
        order[:2] = [1, 0]
    grids = []
    for x, place in zip(_distributed("meshgrid", tensors), order, strict=True):
        lead = [1] * len(tensors)
        lead[place] = x.numel()
        grids.append(x.reshape(lead).expand(shapes[0]))
    return tuple(grids)


@implements(torch.cartesian_prod)
def cartesian_prod(*tensors: Tensor) -> Tensor:
    """Return all tuples of an element of each vector, as rows."""
    check_on_meta(torch.cartesian_prod, *map(any_type, tensors))
    if len(tensors) == 1:
        return tensors[0]
    return stack([x.flatten() for x in meshgrid(*tensors)], 1)


@implements(torch.combinations)
def combinations(input: DistTensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """Return all combinations of `r` elements of a vector, as rows."""
    if input.dim() != 1:
        raise RuntimeError(f"combinations: expected a vector, got the shape {tuple(input.shape)}")
    places = torch.arange(input.shape[0], device=input.device)
    chosen = torch.combinations(places, r, with_replacement)
    return index_select(input, 0, chosen.flatten()).reshape(tuple(chosen.shape))
