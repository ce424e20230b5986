"""Transposed convolution on cut planes equals serial transposed convolution."""

from __future__ import annotations

import random

import pytest
import torch.nn.functional as F

from tests.support.serial import agrees, examples, noted, random_grid, random_layout, random_tensor

pytestmark = pytest.mark.gpu

FUNCTIONS = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@pytest.mark.parallel([1, 2, 3, 6])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_random_transposed_convolutions_equal_serial(n: int) -> None:
    rng = random.Random(n)
    for _ in examples(20):
        grid = random_grid(rng)
        groups = rng.choice([1, 1, 2])
        shape = (rng.choice([1, 2, 3]), groups * rng.choice([1, 2]))
        shape += tuple(rng.randrange(1, 9) for _ in range(n))
        kernel = tuple(rng.choice([1, 2, 3, 4, 5]) for _ in range(n))
        stride = [rng.choice([1, 2, 3]) for _ in range(n)]
        dilation = [rng.choice([1, 1, 2]) for _ in range(n)]
        arguments = {
            "stride": stride,
            "dilation": dilation,
            "padding": [
                rng.randrange(d * (k - 1) // 2 + 1) for k, d in zip(kernel, dilation, strict=True)
            ],
            "output_padding": [
                rng.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True)
            ],
            "groups": groups,
        }
        filters = rng.choice([1, 2, 3])
        x = random_tensor(rng, shape)
        parameters = [random_tensor(rng, (shape[1], filters, *kernel))]
        if rng.random() < 0.5:
            parameters.append(random_tensor(rng, (filters * groups,)))

        def function(x, w, b=None, arguments=arguments):
            return FUNCTIONS[n](x, w, b, **arguments)

        layout = random_layout(rng, grid, shape)
        with noted(shape, kernel, arguments, layout, grid):
            agrees(function, [x], parameters, grid, rng, [layout])
