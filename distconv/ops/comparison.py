"""Comparisons of whole tensors with one bool as result, the same on every rank; and flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distconv import torch_private
from distconv.ops.support.operands import gather_whole
from distconv.tensor.dispatch import RULES, implements
from distconv.tensor.dist_tensor import DistTensor


@implements(torch.equal, torch.Tensor.equal)
def equal(input: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape and the same elements; all ranks call it."""
    return input.shape == other.shape and bool((input == other).all())


@implements(torch.allclose, torch.Tensor.allclose)
def allclose(
    input: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> bool:
    """Return whether all elements of two tensors are close; all ranks call it."""
    return bool(torch.isclose(input, other, rtol, atol, equal_nan).all())


@implements(torch.is_same_size, torch.Tensor.is_same_size)
def is_same_size(input: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape."""
    return input.shape == other.shape


@implements(torch.is_nonzero, torch.Tensor.is_nonzero)
def is_nonzero(input: Any) -> bool:
    """Return whether a tensor of one element is not 0."""
    if input.numel() != 1:
        raise RuntimeError(f"is_nonzero: expected one element, got the shape {tuple(input.shape)}")
    return bool(input.reshape(()))


@implements(torch_private.assert_async)
def assert_async(input: DistTensor, *message: str) -> None:
    """Raise an error, on every rank, where a tensor of one element is 0."""
    torch_private.assert_async(gather_whole(input, "_assert_async"), *message)


def _flag(function: Callable[..., bool], *others: Callable[..., bool]) -> None:
    def rule(input: DistTensor) -> bool:
        return function(input.shard)

    for each in (function, *others):
        RULES[each] = rule


_flag(torch.is_conj, torch.Tensor.is_conj)
_flag(torch.is_neg, torch.Tensor.is_neg)
