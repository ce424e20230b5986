"""Normalisations of each sample by itself: large means, single values."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.support.serial import (
    agrees,
    deviation,
    random_grid,
    random_tensor,
)

RANKS = [1, 2, 4]


@pytest.mark.parallel(RANKS)
def test_group_norm_of_one_value_for_each_channel_of_a_rank() -> None:
    # torch refuses that of a whole batch, not of a block.
    rng, grid = random.Random(2), dc.ProcessGrid(sample=-1)
    x = random_tensor(rng, (grid.size + 1, 1, 1, 1))
    agrees(lambda x: F.group_norm(x, 1), [x], [], grid, rng, [dc.Layout(sample="sample")])


@pytest.mark.parallel([2, 4])
def test_a_large_mean_does_not_cancel_in_single_precision() -> None:
    rng = random.Random(6)
    x = random_tensor(rng, (2, 4, 33, 17), torch.float32) + 1000
    expected = F.group_norm(x.double(), 2)
    actual = F.group_norm(dc.distribute_tensor(x, random_grid(rng)), 2).full_tensor()
    assert deviation(actual.double(), expected) < 1e-3
