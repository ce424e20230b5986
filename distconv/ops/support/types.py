"""Element types: the types that operands must share, and the types in which sums are accurate."""

from __future__ import annotations

import torch
from torch import Tensor

from distconv.ops.support.operands import as_distributed, common_grid
from distconv.tensor.dist_tensor import DistTensor


def accumulation_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which sums over many elements are accurate."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def to_accumulation_type(x: Tensor) -> Tensor:
    """Return `x` in a type in which sums over many elements are accurate."""
    return in_type(x, accumulation_type(x.dtype))


def in_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` in a type, itself where it has it already: faster than `Tensor.to`."""
    return x if x.dtype == dtype else x.to(dtype)


def check_same_types(name: str, *tensors: Tensor | None) -> None:
    """Raise on every rank for types that differ, as torch does on ranks that have elements."""
    given = [t for t in tensors if t is not None]
    if len({t.dtype for t in given}) > 1:
        raise RuntimeError(
            f"{name}: input, weight and bias have the types "
            f"{', '.join(str(t.dtype) for t in given)}; convert them to one"
        )


def distributed_input(name: str, input: Tensor, *parameters: Tensor | None) -> DistTensor:
    """Return the input as a DistTensor on the grid of its parameters, after a check of types."""
    x = as_distributed(input, common_grid(name, (input, *parameters)))
    check_same_types(name, x, *parameters)
    return x
