"""A single sample without a batch dimension is treated as serial torch treats it."""

from __future__ import annotations

import random

import pytest
import torch.nn.functional as F

from tests.support.serial import agrees, random_grid, random_tensor

FUNCTIONS = {
    "conv1d": (1, lambda x, w: F.conv1d(x, w, padding=1)),
    "conv2d": (2, lambda x, w: F.conv2d(x, w, stride=2, padding=1)),
    "conv3d": (3, lambda x, w: F.conv3d(x, w, padding=1)),
    "conv_transpose2d": (2, lambda x, w: F.conv_transpose2d(x, w.transpose(0, 1), stride=2)),
    "max_pool2d": (2, lambda x, w: F.max_pool2d(x, 3, 2, 1)),
    "avg_pool3d": (3, lambda x, w: F.avg_pool3d(x, 2, ceil_mode=True)),
    "adaptive_avg_pool1d": (1, lambda x, w: F.adaptive_avg_pool1d(x, 3)),
    "adaptive_max_pool2d": (2, lambda x, w: F.adaptive_max_pool2d(x, (2, 3))),
}


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_single_sample(name: str) -> None:
    spatial, function = FUNCTIONS[name]
    rng = random.Random(name)
    for _ in range(4):
        x = random_tensor(rng, (2, *(rng.randrange(4, 9) for _ in range(spatial))))
        w = random_tensor(rng, (3, 2, *(3,) * spatial))
        parameters = [w] if "conv" in name else []

        def apply(x, w=None, function=function):
            return function(x, w)

        agrees(apply, [x], parameters, random_grid(rng), rng)
