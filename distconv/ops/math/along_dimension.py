"""Functions along one dimension, which treat all others element by element.

Where that dimension is cut it is made whole first, which is recorded as a redistribution; for
cumulative sums the ranks exchange the sums of their blocks instead.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.comm.collectives import all_gather_with_grad
from distconv.ops.support.argument_forms import normalize_dim
from distconv.ops.support.in_place import implements_in_place
from distconv.ops.support.metadata_checks import any_type, check_on_meta
from distconv.ops.support.types import accumulation_type
from distconv.ops.support.whole_dimensions import apply_along
from distconv.tensor.dispatch import RULES, implements
from distconv.tensor.dist_tensor import DistTensor


def _first(name: str) -> None:
    """Register a function of (input, dim, ...)."""
    function: Any = getattr(torch, name)

    def rule(input: DistTensor, *args: Any, **kwargs: Any) -> Any:
        arguments = list(args)
        dim = arguments.pop(0) if arguments else kwargs.pop("dim", None)
        if dim is None:
            raise TypeError(f"{name}: dim is missing; name the dimension to work along")
        d = normalize_dim(dim, input.dim())
        return apply_along(function, name, input, [d], d, *arguments, **kwargs)

    RULES[function] = RULES[getattr(torch.Tensor, name)] = rule


for _name in ("cummax", "cummin", "cumprod", "logcumsumexp"):
    _first(_name)


@implements(torch.cumsum, torch.Tensor.cumsum)
def cumsum(input: DistTensor, dim: int, *, dtype: torch.dtype | None = None) -> DistTensor:
    """Return the sum of the elements up to each position along one dimension."""
    check_on_meta(torch.cumsum, input, dim, dtype=dtype)
    d = normalize_dim(dim, input.dim())
    x, axes = input.shard, input.cuts[d] if input.dim() else ()
    if not axes:
        return DistTensor(x.cumsum(d, dtype=dtype), input.shape, input.cuts, input.grid)
    kind = dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
    own = x.cumsum(d, dtype=accumulation_type(kind))
    total = own.narrow(d, -1, 1) if x.shape[d] else x.sum(d, True, dtype=own.dtype)
    totals = all_gather_with_grad(total, input.grid, axes)
    before = totals[: input.grid.communicator(axes).rank].sum(0)
    return DistTensor(own.add_(before).to(kind), input.shape, input.cuts, input.grid)


for _name in ("cumprod", "cumsum"):
    implements_in_place(getattr(torch.Tensor, f"{_name}_"), RULES[getattr(torch, _name)])


def _sort(name: str) -> None:
    function: Any = getattr(torch, name)

    @implements(function, getattr(torch.Tensor, name))
    def rule(
        input: DistTensor, dim: int = -1, descending: bool = False, stable: bool | None = False
    ) -> Any:
        d = normalize_dim(dim, input.dim())
        order: Any = dict(dim=d, descending=descending, stable=stable)
        return apply_along(function, name, input, [d], **order)


_sort("argsort")
_sort("sort")


@implements(torch.topk, torch.Tensor.topk)
def topk(
    input: DistTensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Any:
    """Return the k largest or smallest elements along one dimension, and their indices."""
    d = normalize_dim(dim, input.dim())
    return apply_along(torch.topk, "topk", input, [d], k, d, largest, sorted)


@implements(F.glu)
def glu(input: DistTensor, dim: int = -1) -> DistTensor:
    """Return one half of a dimension, gated by the sigmoid of the other."""
    check_on_meta(F.glu, any_type(input), dim)
    d = normalize_dim(dim, input.dim())
    result: DistTensor = apply_along(F.glu, "glu", input, [d], d)
    return result


@implements(torch.frexp, torch.Tensor.frexp)
def frexp(input: DistTensor) -> Any:
    """Return mantissas and exponents."""
    return apply_along(torch.frexp, "frexp", input, [])


@implements(torch.renorm, torch.Tensor.renorm)
def renorm(input: Any, p: float, dim: int, maxnorm: float) -> Tensor:
    """Return the slices along one dimension, scaled down where their norm exceeds `maxnorm`."""
    check_on_meta(torch.renorm, input, p, dim, maxnorm)
    d = normalize_dim(dim, input.dim())
    over = [i for i in range(input.dim()) if i != d]
    length = torch.linalg.vector_norm(input, p, over, keepdim=True)
    scale = torch.where(length > maxnorm, maxnorm / (length + 1e-7), 1.0)
    return input * scale.to(input.dtype)


implements_in_place(torch.Tensor.renorm_, renorm)
