"""Division of tensors into consecutive pieces along one dimension, by number, sizes or bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from distconv.ops.shape.indexing import consecutive, slice_of
from distconv.ops.support.metadata_checks import any_type, check_on_meta
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor

Sections = int | Sequence[int] | Tensor


def _as_numbers(sections: Sections | None) -> int | tuple[int, ...] | None:
    if isinstance(sections, Tensor):
        sections = sections.tolist()
    return tuple(sections) if isinstance(sections, (tuple, list)) else sections  # type: ignore


@implements(torch.tensor_split, torch.Tensor.tensor_split)
def tensor_split(
    input: DistTensor,
    indices_or_sections: Sections | None = None,
    dim: int = 0,
    *,
    sections: Sections | None = None,
    indices: Sections | None = None,
) -> tuple[DistTensor, ...]:
    """Return pieces of nearly equal size, by their number, or pieces between positions."""
    named = sections if indices is None else indices
    given: Any = _as_numbers(indices_or_sections if named is None else named)
    shapes = check_on_meta(torch.tensor_split, any_type(input), given, dim)
    if isinstance(given, int):
        return consecutive(input, [shape[dim] for shape in shapes], dim)
    return tuple(slice_of(input, dim, *bounds) for bounds in pairwise([0, *given, None]))


def _along(function: Callable[..., Any], method: Callable[..., Any], dim: int) -> None:
    @implements(function, method)
    def rule(
        input: DistTensor,
        indices_or_sections: Sections | None = None,
        *,
        sections: Sections | None = None,
        indices: Sections | None = None,
    ) -> tuple[DistTensor, ...]:
        named = sections if indices is None else indices
        given: Any = _as_numbers(indices_or_sections if named is None else named)
        check_on_meta(function, any_type(input), given)
        return tensor_split(input, given, min(dim, input.dim() - 1))


_along(torch.vsplit, torch.Tensor.vsplit, 0)
_along(torch.hsplit, torch.Tensor.hsplit, 1)
_along(torch.dsplit, torch.Tensor.dsplit, 2)
