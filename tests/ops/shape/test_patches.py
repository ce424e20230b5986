"""Windows as columns and back, and power-average pooling, equal the serial ones."""

from __future__ import annotations

import random

import pytest
import torch.nn.functional as F

from tests.support.serial import agrees, examples, random_grid, random_tensor

pytestmark = pytest.mark.gpu

RANKS = [1, 2, 4]


@pytest.mark.parallel(RANKS)
def test_unfold() -> None:
    rng = random.Random(1)
    for _ in examples(10):
        kernel = rng.randrange(1, 4), rng.randrange(1, 4)
        arguments = {
            "kernel_size": kernel,
            "dilation": rng.choice([1, 2]),
            "padding": (rng.choice([0, 1]), rng.choice([0, 2])),
            "stride": rng.choice([1, 2, 3]),
        }
        x = random_tensor(rng, (2, 3, rng.randrange(5, 9), rng.randrange(5, 9)))
        agrees(lambda x, a=arguments: F.unfold(x, **a), [x], [], random_grid(rng), rng)


@pytest.mark.parallel(RANKS)
def test_fold_undoes_unfold_up_to_the_overlaps() -> None:
    rng = random.Random(2)
    for _ in range(5):
        size = rng.randrange(4, 8), rng.randrange(4, 8)
        x = random_tensor(rng, (2, 3, *size))

        def function(x, size=size):
            return F.fold(F.unfold(x, 3, padding=1), size, 3, padding=1)

        agrees(function, [x], [], random_grid(rng), rng)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_power_average_pooling(n: int) -> None:
    rng = random.Random(3)
    pool = {1: F.lp_pool1d, 2: F.lp_pool2d, 3: F.lp_pool3d}[n]
    for norm in (1, 2, 3):
        x = random_tensor(rng, (2, 3, *(rng.randrange(4, 8) for _ in range(n)))).abs()
        stride = rng.choice([None, 1, 2])

        def function(x, norm=norm, stride=stride):
            return pool(x, norm, 3, stride, ceil_mode=norm == 2)

        agrees(function, [x], [], random_grid(rng), rng)
