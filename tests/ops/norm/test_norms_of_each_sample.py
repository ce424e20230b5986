"""Normalisations of each sample by itself equal the serial ones, however the sample is cut."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.support.serial import (
    agrees,
    deviation,
    examples,
    random_grid,
    random_layout,
    random_tensor,
)

RANKS = [1, 2, 4]


def random_shape(rng: random.Random, channels: int) -> tuple[int, ...]:
    plane = [rng.randrange(2, 9) for _ in range(rng.choice([1, 2, 3]))]
    return (rng.choice([1, 2, 5]), channels, *plane)


@pytest.mark.parallel(RANKS)
def test_group_norm() -> None:
    rng = random.Random(1)
    for _ in examples(15):
        groups = rng.choice([1, 2, 3])
        shape = random_shape(rng, groups * rng.choice([1, 2]))
        parameters = [random_tensor(rng, shape[1:2]) for _ in range(rng.choice([0, 2]))]

        def function(x, w=None, b=None, groups=groups):
            return F.group_norm(x, groups, w, b)

        agrees(function, [random_tensor(rng, shape)], parameters, random_grid(rng), rng)


@pytest.mark.parallel(RANKS)
def test_group_norm_of_one_value_for_each_channel_of_a_rank() -> None:
    # torch refuses that of a whole batch, not of a block.
    rng, grid = random.Random(2), dc.ProcessGrid(sample=-1)
    x = random_tensor(rng, (grid.size + 1, 1, 1, 1))
    agrees(lambda x: F.group_norm(x, 1), [x], [], grid, rng, [dc.Layout(sample="sample")])


@pytest.mark.parallel(RANKS)
def test_instance_norm() -> None:
    rng = random.Random(2)
    for _ in examples(15):
        shape = random_shape(rng, rng.choice([1, 3]))
        parameters = [random_tensor(rng, shape[1:2]) for _ in range(rng.choice([0, 2]))]

        def function(x, w=None, b=None):
            return F.instance_norm(x, weight=w, bias=b)

        agrees(function, [random_tensor(rng, shape)], parameters, random_grid(rng), rng)


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("function", [F.layer_norm, F.rms_norm])
def test_norms_over_the_last_dimensions(function) -> None:
    rng = random.Random(3)
    for _ in examples(15):
        shape = random_shape(rng, rng.choice([1, 2, 3]))
        last = shape[rng.randrange(1, len(shape)) :]
        count = rng.choice([0, 1 if function is F.rms_norm else 2])
        parameters = [random_tensor(rng, last) for _ in range(count)]

        def normalise(x, *p, last=last):
            return function(x, last, *p)

        agrees(normalise, [random_tensor(rng, shape)], parameters, random_grid(rng), rng)


@pytest.mark.parallel([1, 4])
def test_local_response_norm() -> None:
    rng = random.Random(4)
    for size in (1, 2, 3):
        x = random_tensor(rng, (2, 5, 7, 6))
        agrees(lambda x, size=size: F.local_response_norm(x, size), [x], [], random_grid(rng), rng)


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
