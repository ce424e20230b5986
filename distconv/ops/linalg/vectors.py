"""Products of vectors and of chains of matrices, and functions composed of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from string import ascii_letters
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.ops.math.product import contract
from distconv.ops.support.argument_forms import normalize_dim
from distconv.ops.support.metadata_checks import check_on_meta
from distconv.ops.support.operands import check_same_types
from distconv.tensor.dispatch import implements


@implements(torch.linalg.multi_dot)
def multi_dot(tensors: Sequence[Tensor]) -> Tensor:
    check_on_meta(torch.linalg.multi_dot, tensors)
    return reduce(torch.matmul, tensors)


@implements(torch.cross, torch.Tensor.cross)
def cross(input: Tensor, other: Tensor, dim: int | None = None) -> Tensor:
    check_on_meta(torch.cross, input, other, dim)
    shape = torch.broadcast_shapes(input.shape, other.shape)
    return torch.linalg.cross(input, other, dim=shape.index(3) if dim is None else dim)


@implements(torch.inner, torch.Tensor.inner)
def inner(input: Tensor, other: Tensor) -> Tensor:
    check_on_meta(torch.inner, input, other)
    if not input.dim() or not other.dim():
        return input * other
    letters = iter(ascii_letters)
    left = "".join(next(letters) for _ in range(input.dim()))
    right = "".join(next(letters) for _ in range(other.dim() - 1)) + left[-1]
    return contract("inner", [left, right], left[:-1] + right[:-1], [input, other])


@implements(torch.tensordot)
def tensordot(a: Tensor, b: Tensor, dims: Any = 2) -> Tensor:
    if isinstance(dims, Tensor):
        dims = dims.tolist()
    if not isinstance(dims, int):
        dims = tuple((d,) if isinstance(d, int) else tuple(d) for d in dims)
    check_on_meta(torch.tensordot, a, b, dims)
    if isinstance(dims, int):
        dims = range(a.dim() - dims, a.dim()), range(dims)
    letters = iter(ascii_letters)
    left, right = ([next(letters) for _ in range(x.dim())] for x in (a, b))
    summed = ""
    for i, j in zip(*dims, strict=True):
        right[normalize_dim(j, b.dim())] = left[normalize_dim(i, a.dim())]
        summed += left[normalize_dim(i, a.dim())]
    kept = [c for c in (*left, *right) if c not in summed]
    return contract("tensordot", ["".join(left), "".join(right)], "".join(kept), [a, b])


@implements(F.bilinear, torch.bilinear)
def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    check_same_types("bilinear", input1, input2, weight, bias)
    check_on_meta(F.bilinear, input1, input2, weight, bias)
    lead = ascii_letters[3 : input1.dim() + 2]
    terms = [f"{lead}a", f"{lead}b", "cab"]
    product = contract("bilinear", terms, f"{lead}c", [input1, input2, weight])
    return product if bias is None else product + bias
