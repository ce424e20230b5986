"""Interpolation of cut planes equals serial interpolation, in every mode."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.support.serial import agrees, examples, noted, random_grid, random_layout, random_tensor

pytestmark = pytest.mark.gpu

MODES = {
    1: ["nearest", "nearest-exact", "linear", "area"],
    2: ["nearest", "nearest-exact", "bilinear", "bicubic", "area"],
    3: ["nearest", "nearest-exact", "trilinear", "area"],
}


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_random_interpolations_equal_serial(n: int) -> None:
    rng = random.Random(n)
    for _ in examples(30):
        grid = random_grid(rng)
        shape = (2, 3, *(rng.randrange(1, 12) for _ in range(n)))
        mode = rng.choice(MODES[n])
        smooth = "linear" in mode or mode == "bicubic"
        arguments: dict = {"mode": mode}
        if smooth and rng.random() < 0.5:
            arguments["align_corners"] = rng.random() < 0.5
        if mode in ("bilinear", "bicubic") and rng.random() < 0.4:
            arguments["antialias"] = True
        if rng.random() < 0.5:
            arguments["size"] = [rng.randrange(1, 20) for _ in range(n)]
        else:
            factors = [rng.choice([0.7, 1.0, 1.5, 2.0, 2.3, 3.0]) for _ in range(n)]
            arguments["scale_factor"] = [
                max(factor, 1 / size) for factor, size in zip(factors, shape[2:], strict=True)
            ]
            if mode != "area" and rng.random() < 0.3:
                arguments["recompute_scale_factor"] = True
        layout = random_layout(rng, grid, shape)

        def function(x, arguments=arguments):
            return F.interpolate(x, **arguments)

        with noted(shape, arguments, layout, grid):
            agrees(function, [random_tensor(rng, shape)], [], grid, rng, [layout])


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
