"""Sums and means over any dimensions equal serial ones."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import distconv as dc
from tests.support.serial import (
    agrees,
    examples,
    noted,
    raises_alike,
    random_grid,
    random_layout,
    random_tensor,
)

RANKS = [1, 2, 4]


def random_reduction(rng: random.Random, x: Tensor, mean: bool) -> tuple[tuple, dict[str, Any]]:
    dims = rng.sample(range(-x.dim(), 0), rng.randrange(x.dim() + 1)) if x.dim() else []
    dims = list({d % x.dim(): rng.choice([d, d % x.dim()]) for d in dims}.values())
    chosen = rng.choice([dims, tuple(dims), dims[0] if dims else None])
    arguments: dict[str, Any] = {"keepdim": True} if rng.random() < 0.5 else {}
    if rng.random() < 0.3 or (mean and not x.is_floating_point()):
        arguments["dtype"] = rng.choice([torch.float64, torch.float32])
    if not arguments and chosen is None:
        return (), {}
    return (chosen,), arguments


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("name", ["sum", "mean"])
def test_random_reductions_equal_serial(name: str) -> None:
    rng = random.Random(len(name))
    for _ in examples(60):
        shape = [rng.choice([1, 2, 3, 5, 8]) for _ in range(rng.randrange(1, 6))]
        x = random_tensor(rng, shape)
        if rng.random() < 0.3:
            x = (10 * x).round().to(rng.choice([torch.int64, torch.int32]))
        grid = random_grid(rng)
        layout = random_layout(rng, grid, x.shape)
        positional, arguments = random_reduction(rng, x, name == "mean")
        as_method = rng.random() < 0.5

        def function(x: Tensor, p: Any = positional, a: Any = arguments, m: Any = as_method) -> Any:
            return getattr(x, name)(*p, **a) if m else getattr(torch, name)(x, *p, **a)

        tolerance = 1e-5 if arguments.get("dtype") == torch.float32 else 1e-10
        with noted(shape, x.dtype, positional, arguments, layout, grid):
            agrees(function, [x], [], grid, rng, [layout], tolerance)


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8])
def test_sums_of_narrow_types_are_wide_as_in_serial(dtype: torch.dtype) -> None:
    rng = random.Random(0)
    x = (100 * random_tensor(rng, (3, 4, 50))).to(dtype)
    for arguments in ((), (2,), ((0, 2), True)):
        agrees(lambda x, a=arguments: x.sum(*a), [x], [], random_grid(rng), rng)


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_mean_of_half_numbers_is_right_where_their_sum_overflows(dtype: torch.dtype) -> None:
    rng = random.Random(3)
    x = (random_tensor(rng, (2, 400, 300)) + 3).to(dtype)
    for arguments in ((), ((1, 2),), (2, True)):
        agrees(lambda x, a=arguments: x.mean(*a), [x], [], random_grid(rng), rng)


@pytest.mark.parallel([1, 2, 4])
def test_reductions_of_no_elements_equal_serial() -> None:
    rng = random.Random(1)
    grid = dc.ProcessGrid(height=-1)
    for shape in ((2, 3, 0, 4), (2, 0, 5, 1)):
        x, layout = random_tensor(rng, shape), dc.Layout(height="height")
        for function in (lambda x: x.sum(), lambda x: x.sum((2, 3)), lambda x: x.sum(1)):
            agrees(function, [x], [], grid, rng, [layout])
        distributed = dc.distribute_tensor(x, grid, layout)
        assert distributed.mean().isnan().full_tensor().all()
        mean = x.mean((1, 2))
        actual = distributed.mean((1, 2)).full_tensor()
        assert torch.equal(actual.isnan(), mean.isnan()) and actual.shape == mean.shape


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum(4),
        lambda x: x.sum((0, 0)),
        lambda x: x.sum((0, -4)),
        lambda x: x.mean(-5),
        lambda x: x.long().mean(),
        lambda x: x.mean(dtype=torch.int64),
        lambda x: x.sum("height"),
        lambda x: x.sum(1.5),
    ],
)
def test_bad_arguments_are_refused_on_all_ranks(function: Any) -> None:
    rng = random.Random(2)
    raises_alike(function, [random_tensor(rng, (2, 3, 4, 5))], [], random_grid(rng), rng)
