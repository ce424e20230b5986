"""Functions of matrices, which are the last two dimensions, and tensordot.

Matrices are gathered on every rank. The dimensions in front of the matrices are a batch, and stay
partitioned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from distconv.ops.math.product import contract
from distconv.ops.support.arguments import check_on_meta, normalize_dim, normalize_dims
from distconv.ops.support.operands import apply_along, apply_to_batches
from distconv.tensor.dispatch import RULES, implements, refuse
from distconv.torch_private import only_raises


def _batchwise(function: Callable[..., Any], names: Sequence[str], inner: Sequence[int]) -> None:
    """Register the rule of a function whose first arguments are batches of matrices or vectors.

    Parameters
    ----------
    names: torch's names of the first arguments.
    inner: for each name 2 if the argument holds matrices, 1 if it holds vectors.
    """
    label = function.__name__.removeprefix("linalg_")

    def rule(*args: Any, **kwargs: Any) -> Any:
        operands = list(args[: len(names)])
        for name in names[len(operands) :]:
            if name not in kwargs:
                raise TypeError(f"{label}: the argument {name} is missing")
            operands.append(kwargs.pop(name))
        rest = args[len(names) :]
        limits = [x for x in (*rest, *kwargs.values()) if isinstance(x, Tensor)]
        if limits:
            reason = "a tensor instead of a number is not supported"
            way_out = "Pass a number, or call it on x.full_tensor()"
            refuse(label, reason, *operands, *limits, way_out=way_out)
        return apply_to_batches(function, label, operands, inner, *rest, **kwargs)

    RULES[function] = rule


_OF_ONE = """
    cholesky cholesky_ex cond det eig eigh eigvals eigvalsh inv inv_ex ldl_factor ldl_factor_ex lu
    lu_factor lu_factor_ex matrix_exp matrix_power matrix_rank pinv qr slogdet svd svdvals
""".split()

_OF_ONE_IN_TORCH = """
    cholesky cholesky_inverse det inverse logdet lu matrix_exp matrix_power pinverse qr slogdet svd
""".split()

for _name in _OF_ONE:
    _batchwise(getattr(torch.linalg, _name), ["A"], [2])
for _name in _OF_ONE_IN_TORCH:
    if only_raises(getattr(torch, _name)):
        continue  # in later versions, where these functions only raise
    for _home in (torch, torch.Tensor):
        _batchwise(getattr(_home, _name), ["A" if _name == "lu" else "input"], [2])

_batchwise(torch.linalg.solve_triangular, ["A", "B"], [2, 2])
_batchwise(torch.linalg.lu_solve, ["LU", "pivots", "B"], [2, 1, 2])
_batchwise(torch.linalg.ldl_solve, ["LD", "pivots", "B"], [2, 1, 2])
_batchwise(torch.linalg.householder_product, ["input", "tau"], [2, 1])
_batchwise(torch.lu_unpack, ["LU_data", "LU_pivots"], [2, 1])
for _home in (torch, torch.Tensor):
    _batchwise(_home.cholesky_solve, ["input", "input2"], [2, 2])
    _batchwise(_home.triangular_solve, ["input", "A"], [2, 2])
    _batchwise(_home.lu_solve, ["input", "LU_data", "LU_pivots"], [2, 2, 1])
    _batchwise(_home.orgqr, ["input", "input2"], [2, 1])
    _batchwise(_home.ormqr, ["input", "input2", "input3"], [2, 1, 2])


def _aligned(A: Tensor, B: Tensor) -> tuple[Tensor, bool]:
    """Return the right-hand sides `B` as matrices, and whether `B` holds vectors.

    The matrices have at least as many batch dimensions as `A`.
    """
    vectors = B.dim() == 1 or (A.dim() - 1 == B.dim() and A.shape[:-1] == B.shape)
    columns = B.unsqueeze(-1) if vectors else B
    while columns.dim() < A.dim():
        columns = columns.unsqueeze(0)
    return columns, vectors


@implements(torch.linalg.solve)
def solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    """Return the solutions X of A X = B, or of X A = B unless `left`. Collective.

    `B` holds matrices or vectors.
    """
    check_on_meta(torch.linalg.solve, A, B, left=left)
    columns, vectors = _aligned(A, B)
    found: Tensor = apply_to_batches(torch.linalg.solve, "solve", [A, columns], [2, 2], left=left)
    return found.squeeze(-1) if vectors else found


@implements(torch.linalg.solve_ex)
def solve_ex(A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False) -> Any:
    options: Any = dict(left=left, check_errors=check_errors)
    check_on_meta(torch.linalg.solve_ex, A, B, **options)
    columns, vectors = _aligned(A, B)
    found = apply_to_batches(torch.linalg.solve_ex, "solve_ex", [A, columns], [2, 2], **options)
    return type(found)((found[0].squeeze(-1), found[1])) if vectors else found


@implements(torch.linalg.matrix_norm)
def matrix_norm(
    A: Any,
    ord: Any = "fro",
    dim: Sequence[int] = (-2, -1),
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    check_on_meta(torch.linalg.matrix_norm, A, ord, tuple(dim), keepdim, dtype=dtype)
    over = normalize_dims(dim, A.dim())
    return apply_along(
        torch.linalg.matrix_norm,
        "matrix_norm",
        A,
        over,
        ord,
        over,
        keepdim,
        dropped=() if keepdim else over,
        dtype=dtype,
    )


@implements(torch.linalg.norm)
def norm(
    A: Tensor,
    ord: Any = None,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    check_on_meta(torch.linalg.norm, A, ord, dim, keepdim, dtype=dtype)
    if dim is None:
        count = A.dim()
    else:
        count = 1 if isinstance(dim, int) else len(dim)
    if ord is None or count == 1:
        ord = 2 if ord is None else ord
        return torch.linalg.vector_norm(A, ord, dim, keepdim, dtype=dtype)
    pair: Any = (-2, -1) if dim is None else dim
    return matrix_norm(A, ord, pair, keepdim, dtype=dtype)


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
