"""Medians, quantiles and other order statistics; the sorted dimension is made whole first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distconv.ops.shape.reshape import flatten
from distconv.ops.support.argument_forms import normalize_dim
from distconv.ops.support.metadata_checks import check_on_meta
from distconv.ops.support.operands import gather_whole
from distconv.ops.support.whole_dimensions import apply_along
from distconv.tensor.dispatch import implements
from distconv.tensor.dist_tensor import DistTensor


def _median(name: str) -> None:
    function: Callable[..., Any] = getattr(torch, name)

    @implements(function, getattr(torch.Tensor, name))
    def rule(input: DistTensor, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None:
            every = range(input.dim())
            return apply_along(function, name, input, every, dropped=every)
        d = normalize_dim(dim, input.dim())
        dropped = () if keepdim else (d,)
        return apply_along(function, name, input, [d], d, keepdim, dropped=dropped)


_median("median")
_median("nanmedian")


@implements(torch.mode, torch.Tensor.mode)
def mode(input: DistTensor, dim: int = -1, keepdim: bool = False) -> Any:
    """Return the most frequent elements along one dimension, and their indices."""
    d = normalize_dim(dim, input.dim())
    dropped = () if keepdim else (d,)
    return apply_along(torch.mode, "mode", input, [d], d, keepdim, dropped=dropped)


@implements(torch.kthvalue, torch.Tensor.kthvalue)
def kthvalue(input: DistTensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """Return the k-th smallest elements along one dimension, and their indices."""
    d = normalize_dim(dim, input.dim())
    dropped = () if keepdim else (d,)
    return apply_along(torch.kthvalue, "kthvalue", input, [d], k, d, keepdim, dropped=dropped)


def _quantile(name: str) -> None:
    function: Callable[..., Any] = getattr(torch, name)

    @implements(function, getattr(torch.Tensor, name))
    def rule(
        input: Tensor,
        q: float | Tensor,
        dim: int | None = None,
        keepdim: bool = False,
        *,
        interpolation: str = "linear",
    ) -> Any:
        check_on_meta(function, input, q, dim, keepdim, interpolation=interpolation)
        if not isinstance(input, DistTensor):
            return function(input, gather_whole(q, name), dim, keepdim, interpolation=interpolation)
        if dim is None:
            x = flatten(input)
            result = rule(x, q, 0, interpolation=interpolation)
            return result.reshape((*result.shape, *(1,) * input.dim())) if keepdim else result
        d = normalize_dim(dim, input.dim())
        fractions = gather_whole(q, name)
        if not isinstance(fractions, Tensor):
            fractions = torch.full((), fractions, dtype=input.dtype, device=input.device)
        # torch puts the quantiles of a vector of fractions first; they go last to fit the cuts.
        last = apply_along(
            _with_quantiles_last, name, input, [d], function, fractions, d, interpolation,
            dropped=[d],
        )  # fmt: skip
        values: Tensor = last.unsqueeze(d) if keepdim else last
        return values.movedim(-1, 0) if fractions.dim() else values.squeeze(-1)


def _with_quantiles_last(
    x: Tensor, function: Callable[..., Tensor], q: Tensor, d: int, interpolation: str
) -> Tensor:
    found = function(x, q.reshape(-1), d, interpolation=interpolation)
    return found.movedim(0, -1)


_quantile("quantile")
_quantile("nanquantile")
