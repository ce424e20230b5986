"""Positions of interpolation are rounded as torch rounds them; see also test_properties."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.support.serial import agrees, random_grid, random_tensor

pytestmark = pytest.mark.gpu


@pytest.mark.parallel([4])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest_positions_round_as_torch_rounds_them(mode: str) -> None:
    rng = random.Random(5)
    for size in (300, 517, 1000):
        grid = random_grid(rng, ["height", "width"])
        x = random_tensor(rng, (1, 1, size, 7))

        def function(x, size=size):
            return F.interpolate(x, size=(size * 7 // 3 + 1, 5), mode=mode)

        agrees(function, [x], [], grid, rng, [None])


@pytest.mark.parallel([4])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_single_precision_agrees_to_the_rounding_of_positions(mode: str) -> None:
    rng = random.Random(6)
    grid = random_grid(rng, ["height", "width"])
    x = random_tensor(rng, (1, 1, 517, 7), torch.float32)

    def function(x):
        return F.interpolate(x, size=(1207, 5), mode=mode)

    agrees(function, [x], [], grid, rng, [None], tolerance=517 * 2**-22)


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_a_factor_a_rounding_error_away_is_exact_or_refused(n: int, mode: str) -> None:
    rng = random.Random(n)
    compared = 0
    for factor in (2.0, 2.0 + 1e-6, 2.0 - 1e-6, 2.0 + 1e-12, 1.1, 2.1, 1.0 + 1e-7):
        for size in (3, 5, 9):
            x = random_tensor(rng, (2, 3, *[size] * n), rng.choice([torch.float32, torch.float64]))

            def function(x, factor=factor):
                return F.interpolate(x, scale_factor=factor, mode=mode)

            try:
                agrees(function, [x], [], random_grid(rng), rng, tolerance=1e-6)
                compared += 1
            except dc.UnsupportedOperation:
                assert n != 2 and factor not in (1.0, 2.0)
    assert compared == 21 or (n != 2 and compared >= 6)
