"""Maxima and minima of cut tensors, their positions and their gradients, equal the serial ones."""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.serial import agrees, examples, random_grid, random_layout, random_tensor

RANKS = [1, 2, 4]


def random_case(rng: random.Random) -> torch.Tensor:
    """Few distinct values, so that many elements attain the extremum."""
    shape = [rng.randrange(1, 6) for _ in range(rng.choice([1, 2, 3, 4]))]
    x = random_tensor(rng, shape)
    return x if rng.random() < 0.4 else x.round()


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("name", ["amax", "amin"])
def test_extreme_values_over_any_dimensions(name: str) -> None:
    rng = random.Random(1)
    for _ in examples(15):
        x = random_case(rng)
        dims = rng.sample(range(x.dim()), rng.randrange(1, x.dim() + 1))
        keepdim = rng.random() < 0.5

        def function(x, dims=dims, keepdim=keepdim):
            return getattr(torch, name)(x, dims, keepdim)

        agrees(function, [x], [], random_grid(rng), rng)


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("name", ["max", "min"])
def test_values_and_global_indices_along_one_dimension(name: str) -> None:
    rng = random.Random(2)
    for _ in examples(15):
        x = random_case(rng)
        dim, keepdim = rng.randrange(-x.dim(), x.dim()), rng.random() < 0.5

        def function(x, dim=dim, keepdim=keepdim):
            return tuple(getattr(x, name)(dim, keepdim))

        agrees(function, [x], [], random_grid(rng), rng)
        agrees(lambda x: getattr(torch, name)(x), [x], [], random_grid(rng), rng)


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_positions_are_those_in_the_global_tensor(name: str) -> None:
    rng = random.Random(3)
    for _ in examples(15):
        x = random_case(rng)
        dim = rng.choice([None, *range(x.dim())])

        def function(x, dim=dim):
            return getattr(torch, name)(x, dim)

        agrees(function, [x], [], random_grid(rng), rng)


@pytest.mark.parallel([2, 4])
def test_not_a_number_wins() -> None:
    rng = random.Random(4)
    grid = random_grid(rng, ["height", "width"])
    x = random_tensor(rng, (5, 6))
    x[3, 4] = torch.nan
    import distconv as dc

    y = dc.distribute_tensor(x, grid, random_layout(rng, grid, x.shape))
    assert torch.isnan(y.amax().full_tensor())
    assert y.max(1).indices.full_tensor().tolist() == x.max(1).indices.tolist()
    assert y.argmax().item() == x.argmax().item()


@pytest.mark.parallel([1, 3])
def test_the_larger_of_two_tensors() -> None:
    rng = random.Random(5)
    x, y = random_tensor(rng, (4, 5)), random_tensor(rng, (4, 5))
    agrees(torch.max, [x, y], [], random_grid(rng), rng)
    agrees(lambda x, y: x.min(y), [x], [y], random_grid(rng), rng)
