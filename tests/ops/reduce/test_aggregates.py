"""Products, norms, variances and the like over cut dimensions equal the serial ones."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.support.serial import agrees, random_grid, random_tensor

RANKS = [1, 2, 4]


def over_random_dimensions(function: Callable, seed: int, cases: int = 10, least: int = 1) -> None:
    """Compare `function(x, dims, keepdim)` with serial; some tensors are shorter than the grid."""
    rng = random.Random(seed)
    for _ in range(cases):
        shape = [rng.randrange(least, 6) for _ in range(rng.choice([1, 2, 3, 4]))]
        dims = rng.sample(range(len(shape)), rng.randrange(1, len(shape) + 1))
        keepdim = rng.random() < 0.5

        def chosen(x, dims=dims, keepdim=keepdim):
            return function(x, dims, keepdim)

        agrees(chosen, [random_tensor(rng, shape)], [], random_grid(rng), rng)


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("order", [0, 0.5, 1, 2, 3, float("inf")])
def test_norms_of_any_order(order: float) -> None:
    over_random_dimensions(lambda x, d, k: torch.linalg.vector_norm(x, order, d, k), 1, 6)


@pytest.mark.parallel(RANKS)
def test_log_sums_of_exponentials() -> None:
    over_random_dimensions(lambda x, d, k: torch.logsumexp(500 * x, d, k), 2)


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("name", ["var", "std"])
@pytest.mark.parametrize("correction", [0, 1])
def test_variances(name: str, correction: int) -> None:
    def function(x, dims, keepdim):
        return getattr(torch, name)(x, dims, correction=correction, keepdim=keepdim)

    over_random_dimensions(function, 3, least=2)


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


@pytest.mark.parallel(RANKS)
def test_products_with_zeros() -> None:
    def function(x, dims, keepdim):
        x = torch.where(x.abs() < 0.3, x * 0, x)
        return x.prod(dims[0], keepdim)

    over_random_dimensions(function, 5)
    over_random_dimensions(lambda x, dims, keepdim: x.prod(), 6, 4)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("name", ["all", "any"])
def test_logical_reductions(name: str) -> None:
    def function(x, dims, keepdim):
        return getattr(torch, name)(x > 0.5, dims[0], keepdim)

    over_random_dimensions(function, 7)
    over_random_dimensions(lambda x, dims, keepdim: getattr(x > -3, name)(), 8, 4)


@pytest.mark.parallel([1, 2, 4])
def test_norm_of_a_zero_tensor_has_the_serial_gradient() -> None:
    rng = random.Random(9)
    agrees(lambda x: (0 * x).norm(), [random_tensor(rng, (5, 4))], [], random_grid(rng), rng)
    agrees(lambda x: x.norm(p=1, dim=1), [random_tensor(rng, (5, 4))], [], random_grid(rng), rng)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_normalised_vectors(dim: int) -> None:
    rng = random.Random(10)
    x = random_tensor(rng, (3, 5, 4))
    agrees(lambda x: F.normalize(x, dim=dim), [x], [], random_grid(rng), rng)
