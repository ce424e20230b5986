"""Functions that bring tensors to one shape, join several, or divide one along a dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from distconv.ops.shape.indexing import cat, consecutive, slice_of
from distconv.ops.support.metadata_checks import any_type, check_on_meta
from distconv.ops.support.operands import as_distributed, broadcast_shape, common_grid
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor
from distconv.torch_private import of_sequence


def _distributed(name: str, tensors: Sequence[Tensor]) -> list[DistTensor]:
    grid = common_grid(name, tensors)
    return [as_distributed(x, grid) for x in tensors]


@implements(torch.broadcast_tensors)
def broadcast_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
    shape = broadcast_shape("broadcast_tensors", tensors)
    return tuple(x.expand(shape) for x in _distributed("broadcast_tensors", tensors))


def _at_least(function: Callable[..., Any], grown: Callable[[Tensor], Tensor]) -> None:
    @implements(of_sequence(function.__name__))
    def each(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(grown(x) for x in _distributed(function.__name__, tensors))

    @implements(function)
    def rule(*tensors: Tensor) -> Any:
        results = each(tensors)
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
    pieces = [_as_vector(x) for x in tensors]
    return cat(pieces, 0 if pieces[0].dim() == 1 else 1)


@implements(torch.vstack, torch.row_stack)
def vstack(tensors: Sequence[Tensor]) -> DistTensor:
    return cat([_as_matrix(x) for x in tensors], 0)


@implements(torch.dstack)
def dstack(tensors: Sequence[Tensor]) -> DistTensor:
    return cat([_as_volume(x) for x in tensors], 2)


@implements(torch.column_stack)
def column_stack(tensors: Sequence[Tensor]) -> DistTensor:
    return cat([x if x.dim() > 1 else _as_vector(x).unsqueeze(1) for x in tensors], 1)


def _divided(function: Callable[..., Any], along: int | None = None) -> None:
    """Register torch.tensor_split, or a split along the fixed dimension `along`, such as vsplit."""

    @implements(function, getattr(Tensor, function.__name__))
    def rule(input: DistTensor, *args: Any, **named: Any) -> tuple[DistTensor, ...]:
        dim = named.pop("dim", args[1] if args[1:] else 0)
        (given,) = (*args[:1], *named.values())  # under any of torch's names
        given = given.tolist() if isinstance(given, Tensor) else given
        given = given if isinstance(given, int) else tuple(given)
        named_dim = () if along is not None else (dim,)
        shapes = check_on_meta(function, any_type(input), given, *named_dim)
        dim = dim if along is None else min(along, input.dim() - 1)
        if isinstance(given, int):
            return consecutive(input, [shape[dim] for shape in shapes], dim)
        return tuple(slice_of(input, dim, *bounds) for bounds in pairwise([0, *given, None]))


_divided(torch.tensor_split)
_divided(torch.vsplit, 0)
_divided(torch.hsplit, 1)
_divided(torch.dsplit, 2)
