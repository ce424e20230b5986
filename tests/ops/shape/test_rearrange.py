"""Elements are assigned where positions pick them, as serially; see also test_masks."""

from __future__ import annotations

import random

import pytest
import torch

import distconv as dc
from tests.support.serial import (
    agrees,
    deviation,
    random_grid,
    random_layout,
    random_tensor,
)

RANKS = [1, 2, 4]


@pytest.mark.parallel(RANKS)
def test_assignment_where_positions_pick_elements() -> None:
    rng = random.Random(8)
    x, values = random_tensor(rng, (5, 4, 3)), random_tensor(rng, (5, 4, 3))
    places = torch.tensor([3, 0, -1])

    def written(x, values):
        y = x * 1.5
        y[:, places] = values[:, :3]
        y[[4, 1], 2:, [0, 2]] = 7.0
        return y * x

    for _ in range(3):
        agrees(written, [x, values], [], random_grid(rng), rng)
        agrees(written, [x], [values], random_grid(rng), rng)


@pytest.mark.parallel(RANKS)
def test_a_plain_tensor_is_assigned_what_is_made_whole_on_every_rank() -> None:
    rng = random.Random(9)
    grid, whole = random_grid(rng), random_tensor(rng, (5, 4))
    x = dc.distribute_tensor(whole, grid, random_layout(rng, grid, whole.shape))

    def written(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(5, 4, dtype=torch.float64)
        y[1:3] = x[2:4]
        y[0, 2] = x.sum()
        y[x > 1] = 7.0
        return y

    actual, expected = written(x), written(whole)
    assert type(actual) is torch.Tensor and deviation(actual, expected) <= 1e-12
