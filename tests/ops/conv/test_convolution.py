"""Padding modes of modules; see also `windowed/test_properties`."""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.serial import agrees, random_grid, random_tensor

pytestmark = pytest.mark.gpu


@pytest.mark.parallel([2])
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_all_padding_modes_of_convolution_modules(mode: str, n: int) -> None:
    rng = random.Random(7 * n)
    for _ in range(2):
        grid = random_grid(rng)
        make = {1: torch.nn.Conv1d, 2: torch.nn.Conv2d, 3: torch.nn.Conv3d}[n]
        conv = make(
            2,
            3,
            rng.choice([2, 3, 4]),
            padding=rng.choice([1, 2, "same"]),
            dilation=rng.choice([1, 2]),
            padding_mode=mode,
        ).double()
        shape = (2, 2, *(rng.randrange(4, 11) for _ in range(n)))
        x = random_tensor(rng, shape)

        def function(x, w, b, conv=conv):
            return torch.func.functional_call(conv, {"weight": w, "bias": b}, (x,))

        parameters = [random_tensor(rng, p.shape) for p in conv.parameters()]
        agrees(function, [x], parameters, grid, rng)
