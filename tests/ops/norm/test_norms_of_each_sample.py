"""Normalisations of each sample by itself: running statistics, large means, single values."""

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
    random_layout,
    random_tensor,
)

RANKS = [1, 2, 4]


@pytest.mark.parallel(RANKS)
def test_group_norm_of_one_value_for_each_channel_of_a_rank() -> None:
    # torch refuses that of a whole batch, not of a block.
    rng, grid = random.Random(2), dc.ProcessGrid(sample=-1)
    x = random_tensor(rng, (grid.size + 1, 1, 1, 1))
    agrees(lambda x: F.group_norm(x, 1), [x], [], grid, rng, [dc.Layout(sample="sample")])


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_running_statistics_of_instance_norm_are_the_serial_ones(n: int) -> None:
    rng = random.Random(5)
    kind = {1: torch.nn.InstanceNorm1d, 2: torch.nn.InstanceNorm2d, 3: torch.nn.InstanceNorm3d}[n]
    serial, distributed = (kind(3, affine=True, track_running_stats=True).double() for _ in "ab")
    grid = random_grid(rng)
    for _ in range(3):
        shape = (rng.choice([4, 5]), 3, *(rng.randrange(2, 7) for _ in range(n)))
        x = random_tensor(rng, shape)
        serial(x)
        distributed(dc.distribute_tensor(x, grid, random_layout(rng, grid, shape)))
    for actual, expected in zip(distributed.buffers(), serial.buffers(), strict=True):
        assert deviation(actual, expected) < 1e-12
    x = random_tensor(rng, shape)
    actual = distributed.eval()(dc.distribute_tensor(x, grid)).full_tensor()
    assert deviation(actual, serial.eval()(x)) < 1e-12


@pytest.mark.parallel([2, 4])
def test_a_large_mean_does_not_cancel_in_single_precision() -> None:
    rng = random.Random(6)
    x = random_tensor(rng, (2, 4, 33, 17), torch.float32) + 1000
    expected = F.group_norm(x.double(), 2)
    actual = F.group_norm(dc.distribute_tensor(x, random_grid(rng)), 2).full_tensor()
    assert deviation(actual.double(), expected) < 1e-3
