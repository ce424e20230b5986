"""Products of vectors and of chains of matrices, and functions composed of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from string import ascii_letters
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.ops.math.product import contract, matmul
from distconv.ops.support.argument_forms import normalize_dim
from distconv.ops.support.metadata_checks import check_on_meta
from distconv.ops.support.types import check_same_types
from distconv.tensor.dispatch import implements

implements(torch.linalg.matmul)(matmul)


@implements(torch.linalg.multi_dot)
def multi_dot(tensors: Sequence[Tensor]) -> Tensor:
    """Return the product of a chain of matrices; the first and the last may be vectors."""
    check_on_meta(_multi_dot, *tensors)
    return reduce(torch.matmul, tensors)


def _multi_dot(*tensors: Tensor) -> Tensor:
    return torch.linalg.multi_dot(tensors)


@implements(torch.chain_matmul)
def chain_matmul(*matrices: Tensor) -> Tensor:
    """Return the product of a chain of matrices."""
    check_on_meta(torch.chain_matmul, *matrices)
    return reduce(torch.matmul, matrices)


@implements(torch.linalg.vecdot)
def vecdot(x: Tensor, y: Tensor, *, dim: int = -1) -> Tensor:
    """Return the products of vectors along one dimension, the first of them conjugated."""
    check_on_meta(torch.linalg.vecdot, x, y, dim=dim)
    return (x.conj() * y).sum(dim)


@implements(torch.vdot, torch.Tensor.vdot)
def vdot(input: Tensor, other: Tensor) -> Tensor:
    """Return the product of two vectors, the first of them conjugated."""
    check_on_meta(torch.vdot, input, other)
    return torch.dot(input.conj(), other)


@implements(torch.linalg.cross)
def linalg_cross(input: Tensor, other: Tensor, *, dim: int = -1) -> Tensor:
    """Return the cross products of vectors of three elements along one dimension."""
    check_on_meta(torch.linalg.cross, input, other, dim=dim)
    first = torch.roll(input, -1, dim) * torch.roll(other, -2, dim)
    return first - torch.roll(input, -2, dim) * torch.roll(other, -1, dim)


@implements(torch.cross, torch.Tensor.cross)
def cross(input: Tensor, other: Tensor, dim: int | None = None) -> Tensor:
    """Return the cross products along one dimension, or along the first of three elements."""
    check_on_meta(torch.cross, input, other, dim)
    shape = torch.broadcast_shapes(input.shape, other.shape)
    return linalg_cross(input, other, dim=shape.index(3) if dim is None else dim)


@implements(torch.inner, torch.Tensor.inner)
def inner(input: Tensor, other: Tensor) -> Tensor:
    """Return the products over the last dimensions."""
    check_on_meta(torch.inner, input, other)
    if not input.dim() or not other.dim():
        return input * other
    letters = iter(ascii_letters)
    left = "".join(next(letters) for _ in range(input.dim()))
    right = "".join(next(letters) for _ in range(other.dim() - 1)) + left[-1]
    return contract("inner", [left, right], left[:-1] + right[:-1], [input, other])


@implements(torch.tensordot)
def tensordot(a: Tensor, b: Tensor, dims: Any = 2) -> Tensor:
    """Return the product over the `dims` last and first dimensions, or over pairs of dimensions."""
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


@implements(torch.kron, torch.Tensor.kron)
def kron(input: Tensor, other: Tensor) -> Tensor:
    """Return the Kronecker product: every element of the first times the second."""
    check_on_meta(torch.kron, input, other)
    n = max(input.dim(), other.dim())
    x, y = (t.reshape((1,) * (n - t.dim()) + tuple(t.shape)) for t in (input, other))
    x = x.reshape([m for size in x.shape for m in (size, 1)])
    y = y.reshape([m for size in y.shape for m in (1, size)])
    pairs = x * y
    return pairs.reshape([pairs.shape[2 * d] * pairs.shape[2 * d + 1] for d in range(n)])


@implements(torch.linalg.vander)
def vander(x: Tensor, N: int | None = None) -> Tensor:
    """Return the powers 0, 1, ... of every element: `N`, or as many as the last dimension."""
    shape = check_on_meta(torch.linalg.vander, x, N=N)
    exponents = torch.arange(shape[-1], device=x.device)
    return x.unsqueeze(-1) ** exponents


@implements(F.bilinear, torch.bilinear)
def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x1^T A x2 + b over the last dimensions, for every matrix A of the weight."""
    check_same_types("bilinear", input1, input2, weight, bias)
    check_on_meta(F.bilinear, input1, input2, weight, bias)
    lead = ascii_letters[3 : input1.dim() + 2]
    terms = [f"{lead}a", f"{lead}b", "cab"]
    product = contract("bilinear", terms, f"{lead}c", [input1, input2, weight])
    return product if bias is None else product + bias


@implements(torch.cov, torch.Tensor.cov)
def cov(
    input: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    """Return the covariances of variables, the rows, over observations, the columns."""
    x = _observations("cov", input)
    weights = [w for w in (fweights, aweights) if w is not None]
    for w in weights:
        if w.dim() > 1 or w.numel() != x.shape[1] or w.is_floating_point() is (w is fweights):
            raise RuntimeError(
                f"cov: weights {tuple(w.shape)} of {w.dtype} for {x.shape[1]} observations; "
                "expected one for each, whole numbers as fweights and floating ones as aweights"
            )
        if (w < 0).any():
            raise RuntimeError("cov: some weights are negative; expected such from 0")
    if not weights:
        deviation = x - x.mean(1, keepdim=True)
        count: Any = max(x.shape[1] - correction, 0)
        return (deviation @ deviation.mT.conj() / count).squeeze()
    weight = reduce(torch.mul, weights)
    total = weight.sum()
    lost = correction if aweights is None else correction * (weight * aweights).sum() / total
    deviation = x - (x * weight).sum(1, keepdim=True) / total
    covariance = (deviation * weight) @ deviation.mT.conj() / (total - lost).clamp(min=0)
    return covariance.squeeze()


def _observations(name: str, input: Tensor) -> Tensor:
    """Return the observations as columns; a vector is one variable, a row."""
    if input.dim() > 2 or not input.is_floating_point() and not input.is_complex():
        raise RuntimeError(
            f"{name}: an input {tuple(input.shape)} of {input.dtype}; expected at most two "
            "dimensions of a floating type, x.double() say"
        )
    x = input.unsqueeze(0) if input.dim() < 2 else input
    return x.unsqueeze(1) if x.dim() < 2 else x


@implements(torch.corrcoef, torch.Tensor.corrcoef)
def corrcoef(input: Tensor) -> Tensor:
    """Return the correlation coefficients of variables, in rows, over observations, in columns."""
    c = cov(_observations("corrcoef", input))
    if not c.dim():
        return c / c
    spread = c.diagonal().sqrt() if not c.is_complex() else c.diagonal().real.sqrt()
    r = c / spread.unsqueeze(1) / spread.unsqueeze(0)
    if r.is_complex():
        return torch.complex(r.real.clip(-1, 1), r.imag.clip(-1, 1))
    return r.clip(-1, 1)
