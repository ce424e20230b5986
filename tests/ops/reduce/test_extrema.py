"""Maxima and minima of cut tensors: not a number, and of two tensors."""

from __future__ import annotations

import random

import pytest
import torch

import distconv as dc
from tests.support.serial import agrees, random_grid, random_layout, random_tensor


@pytest.mark.parallel([2, 4])
def test_not_a_number_wins() -> None:
    rng = random.Random(4)
    grid = random_grid(rng, ["height", "width"])
    x = random_tensor(rng, (5, 6))
    x[3, 4] = torch.nan
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
