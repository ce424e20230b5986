"""Positions of maxima are those in the global plane, and lead back to it."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.support.serial import agrees, random_grid, random_tensor

pytestmark = pytest.mark.gpu

POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
UNPOOLS = {1: F.max_unpool1d, 2: F.max_unpool2d, 3: F.max_unpool3d}


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_indices_into_the_global_plane(n: int) -> None:
    rng = random.Random(n)
    for _ in range(8):
        kernel = [rng.choice([1, 2, 3]) for _ in range(n)]
        arguments = {
            "stride": [rng.choice([1, 2, 3]) for _ in kernel],
            "padding": [rng.randrange(k // 2 + 1) for k in kernel],
            "dilation": [rng.choice([1, 1, 2]) for _ in kernel],
            "ceil_mode": rng.random() < 0.5,
        }
        x = random_tensor(rng, (2, 3, *(rng.randrange(5, 9) for _ in range(n)))).round()
        if rng.random() < 0.3:
            x = x[0]

        def function(x, kernel=kernel, arguments=arguments):
            return POOLS[n](x, kernel, return_indices=True, **arguments)

        agrees(function, [x], [], random_grid(rng), rng)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_maxima_return_to_where_they_came_from(n: int) -> None:
    rng = random.Random(n)
    for _ in range(5):
        x = random_tensor(rng, (2, 3, *(rng.randrange(4, 9) for _ in range(n))))

        def function(x):
            values, indices = POOLS[n](x, 2, return_indices=True)
            return UNPOOLS[n](values, indices, 2, output_size=x.shape[2:])

        agrees(function, [x], [], random_grid(rng), rng)


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_unpooling_what_was_pooled_moves_halos_only(n: int) -> None:
    grid = dc.ProcessGrid(width=-1)
    x = torch.randn(2, 3, *(12 + d for d in range(n)), dtype=torch.float64)
    d = dc.distribute_tensor(x, grid).requires_grad_()
    x.requires_grad_()
    dc.redistributions(reset=True)
    for y in (x, d):
        values, indices = POOLS[n](y, 3, stride=2, return_indices=True)
        made = UNPOOLS[n](values * 2, indices, 3, 2, output_size=x.shape[2:])
        made.pow(2).sum().backward()
    assert dc.redistributions() == []
    torch.testing.assert_close(d.grad.full_tensor(), x.grad, rtol=1e-13, atol=0)


@pytest.mark.parallel([2, 3])
def test_indices_far_from_their_windows_are_found() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = torch.arange(1.0, 17).reshape(1, 1, 4, 4)
    indices = torch.arange(64).flip(0)[::4].reshape(1, 1, 4, 4)
    made = F.max_unpool2d(dc.distribute_tensor(x, grid), indices, 2)
    torch.testing.assert_close(made.full_tensor(), F.max_unpool2d(x, indices, 2))
