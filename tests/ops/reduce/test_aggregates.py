"""Variances in older forms, and norms of zeros; see also test_properties."""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.serial import agrees, random_grid, random_tensor


@pytest.mark.parallel([2, 4])
def test_variance_and_mean_in_the_older_forms_of_the_arguments() -> None:
    rng = random.Random(4)
    x = random_tensor(rng, (4, 5, 6)) + 1000
    for function in (
        lambda x: torch.var_mean(x, (0, 2)),
        lambda x: torch.std_mean(x, 1, keepdim=True),
        lambda x: x.var(False),
        lambda x: x.var((1, 2), False),
        lambda x: x.std(),
    ):
        agrees(function, [x], [], random_grid(rng), rng)


@pytest.mark.parallel([1, 2, 4])
def test_norm_of_a_zero_tensor_has_the_serial_gradient() -> None:
    rng = random.Random(9)
    agrees(lambda x: (0 * x).norm(), [random_tensor(rng, (5, 4))], [], random_grid(rng), rng)
    agrees(lambda x: x.norm(p=1, dim=1), [random_tensor(rng, (5, 4))], [], random_grid(rng), rng)
