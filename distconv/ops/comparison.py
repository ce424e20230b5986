"""Comparisons of whole tensors with one bool as result, the same on every rank; and flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distconv import torch_private
from distconv.ops.support.operands import gather_whole
from distconv.tensor.dispatch import RULES, implements
from distconv.tensor.dist_tensor import DistTensor


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
