"""Sums and means of narrow types, of no elements, and over bad dimensions."""

from __future__ import annotations

import random

import pytest
import torch

import distconv as dc
from tests.support.serial import (
    agrees,
    random_grid,
    random_tensor,
)


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
