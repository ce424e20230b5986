"""Reductions, extrema and functions along a dimension equal the serial ones, on any grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from tests.support.strategies import (
    FLOATING,
    INTEGER,
    Case,
    on_any_grid,
    shapes,
    sizes,
    tolerance_of,
)

pytestmark = pytest.mark.gpu

WILD = ("normal", "negative", "ties", "equal", "wild")


def dims(case: Case, x: Tensor) -> Any:
    """Draw one dimension, several, or None for all."""
    several = case.some([case.one_of(d, d - x.dim()) for d in range(x.dim())])
    return case.one_of(*([several[0]] if several else []), several, tuple(several), None)


def dim(case: Case, x: Tensor) -> int:
    return case.draw(st.integers(-x.dim(), x.dim() - 1))


@on_any_grid(14)
@pytest.mark.parametrize("name", ["sum", "mean"])
def test_sums_and_means_equal_serial_in_every_type(case: Case, name: str) -> None:
    x = case.tensor(case.draw(shapes(0)), *WILD, dtype=case.one_of(*FLOATING, *INTEGER, torch.bool))
    over, keepdim = dims(case, x), case.flag()
    dtype = case.one_of(None, torch.float64, torch.float32, torch.int32)
    if x.is_floating_point() and dtype == torch.int32:
        dtype = None
    case.agrees(
        lambda x: getattr(torch, name)(x, over, keepdim, dtype=dtype),
        x,
        tolerance=tolerance_of(x.dtype, dtype or x.dtype),
    )


@on_any_grid(27)
def test_other_reductions_equal_serial(case: Case) -> None:
    spread = case.flag()
    x = case.tensor(case.draw(shapes(1)), *WILD)
    over, one, keepdim = dims(case, x), dim(case, x), case.flag()
    order, correction = case.one_of(2, 1, 3, 0.5, 0, torch.inf), case.one_of(1, 0, 2)
    spreads = {
        "var": lambda x: torch.var(x, over, correction=correction, keepdim=keepdim),
        "std": lambda x: torch.std(x, over, correction=correction, keepdim=keepdim),
        "var_mean": lambda x: torch.var_mean(x, over, correction=correction, keepdim=keepdim),
    }
    others = {
        "prod": lambda x: x.prod(one, keepdim),
        "prod of all": lambda x: x.prod(),
        "norm": lambda x: torch.linalg.vector_norm(x, order, over, keepdim),
        "older norm": lambda x: x.norm(dim=over, keepdim=keepdim),
        "logsumexp": lambda x: torch.logsumexp(500 * x, one, keepdim),
        "normalize": lambda x: F.normalize(x, dim=one),
        "all": lambda x: torch.all(x > 0, one, keepdim),
        "any": lambda x: torch.any(x > 0, one, keepdim),
        "any of all": lambda x: x.any(),
    }
    functions = spreads if spread else others
    unsupported = r"^var: .* is not supported" if spread else None
    case.agrees(functions[case.one_of(*functions)], x, unsupported=unsupported)


@on_any_grid(5)
def test_cosine_similarity_equals_serial(case: Case) -> None:
    shape = case.draw(shapes(1))
    d, eps = case.draw(st.integers(0, len(shape) - 1)), case.one_of(1e-8, 1.0)
    # Of vectors of one element the gradient is 0, but for rounding.
    shape[d] = max(shape[d], 1) + 1
    x, y = (
        case.tensor([n if i == d else case.one_of(n, n, 1) for i, n in enumerate(shape)])
        for _ in "xy"
    )
    case.agrees(lambda x, y: F.cosine_similarity(x, y, d, eps), x, y)


@on_any_grid(27)
def test_extrema_and_their_positions_equal_serial(case: Case) -> None:
    name = case.one_of("along", "of all", "over", "position", "position in all")
    x = case.tensor(case.draw(shapes(1)), "ties", *WILD, dtype=case.one_of(*FLOATING, *INTEGER))
    over, one, keepdim = dims(case, x), dim(case, x), case.flag()
    which = case.one_of("max", "min")
    functions = {
        "along": lambda x: tuple(getattr(x, which)(one, keepdim)),
        "of all": lambda x: getattr(x, which)(),
        "over": lambda x: getattr(torch, f"a{which}")(x, () if over is None else over, keepdim),
        "position": lambda x: getattr(torch, f"arg{which}")(x, one, keepdim),
        "position in all": lambda x: getattr(torch, f"arg{which}")(x),
    }
    case.agrees(functions[name], x)


@on_any_grid(27)
def test_functions_along_one_dimension_equal_serial(case: Case) -> None:
    shape = case.draw(shapes(1))
    x = case.tensor(shape, *WILD, dtype=case.one_of(*FLOATING[:2], torch.int64))
    d, flag = dim(case, x), case.flag()
    k = case.draw(sizes(0, x.shape[d]))
    dtype = case.one_of(None, torch.float64)
    functions = {
        "softmax": lambda x: F.softmax(x, d, dtype=dtype),
        "log_softmax": lambda x: torch.log_softmax(x, d, dtype=dtype),
        "softmin": lambda x: F.softmin(x, d, dtype=dtype),
        "cumsum": lambda x: x.cumsum(d, dtype=dtype),
        "cumprod": lambda x: torch.cumprod(x, d, dtype=dtype),
        "logcumsumexp": lambda x: torch.logcumsumexp(x, d),
        "cummax": lambda x: tuple(torch.cummax(x, d)),
        "cummin": lambda x: tuple(x.cummin(d)),
        "sort": lambda x: tuple(torch.sort(x, dim=d, descending=flag)),
        "argsort": lambda x: torch.argsort(x, d, flag),
        "topk": lambda x: tuple(torch.topk(x, k, d, flag)),
        "glu": lambda x: F.glu(x, d),
    }
    case.agrees(functions[case.one_of(*functions)], x)
