"""Tensors within arguments: one, several, or nested in lists, tuples and dictionaries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from operator import is_
from typing import Any

import torch
from torch import Tensor

from distconv.tensor.base import DistTensorBase

Tensors = Tensor | Sequence[Tensor]


def as_list(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return a list of the given tensor, or of all given tensors."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def shards_of(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return the plain tensors that autograd knows: shards of DistTensors, and plain tensors.

    A merged tensor gives the shard of its `unmerged`.
    """
    return [x.held if isinstance(x, DistTensorBase) else x for x in as_list(tensors)]


def tensors_in(*arguments: Any) -> list[Tensor]:
    """Return all tensors in arguments, also in nested lists, tuples and dictionaries."""
    found: list[Tensor] = []
    for argument in arguments:
        if type(argument) in _SIMPLE:
            continue
        if isinstance(argument, Tensor):
            found.append(argument)
        elif isinstance(argument, (tuple, list)):
            if not _SIMPLE.issuperset(map(type, argument)):
                found += tensors_in(*argument)
        elif isinstance(argument, dict) and argument:
            found += tensors_in(*argument.values())
    return found


def replaced(argument: Any, others: Mapping[int, Any]) -> Any:
    """Return a nested argument with `others[id(x)]` in place of tensors `x` whose id is there."""
    if isinstance(argument, Tensor):
        return others.get(id(argument), argument)
    if isinstance(argument, (tuple, list)):
        items = [replaced(x, others) for x in argument]
        if all(map(is_, items, argument)):
            return argument
        if type(argument) is list:
            return items
        kind: Any = type(argument)
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    if isinstance(argument, dict):
        found = {key: replaced(x, others) for key, x in argument.items()}
        if type(argument) is dict:
            return found
        (other := copy(argument)).update(found)
        return other
    return argument


_SIMPLE = {int, float, bool, str, type(None), torch.dtype}
"""Types of most arguments that are no tensors."""
