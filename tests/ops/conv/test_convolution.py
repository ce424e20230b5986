"""Convolution on cut planes equals serial convolution."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from tests.support.serial import agrees, examples, noted, random_grid, random_layout, random_tensor

pytestmark = pytest.mark.gpu

RANKS = [1, 2, 3, 8]
FUNCTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def random_case(rng: random.Random, n: int) -> tuple:
    groups = rng.choice([1, 1, 1, 2, 4])
    channels, filters = groups * rng.choice([1, 2]), groups * rng.choice([1, 2, 3])
    kernel = [rng.choice([1, 2, 3, 4, 5, 7]) for _ in range(n)]
    dilation = [rng.choice([1, 1, 2, 3]) for _ in range(n)]
    padding: object = [rng.choice([0, 1, 2, k // 2]) for k in kernel]
    stride = [rng.choice([1, 1, 2, 3]) for _ in range(n)]
    if rng.random() < 0.2:
        padding = rng.choice(["same", "valid"])
        stride = [1] * n if padding == "same" else stride
    need = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    plane = [
        max(
            rng.randrange(1, 13),
            k if padding == "valid" else k - 2 * p if isinstance(padding, list) else 1,
        )
        for k, p in zip(need, padding if isinstance(padding, list) else need, strict=True)
    ]
    batch = rng.choice([1, 2, 3, 5])
    return (
        (batch, channels, *plane),
        (filters, channels // groups, *kernel),
        dict(stride=stride, padding=padding, dilation=dilation, groups=groups),
    )


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_random_convolutions_equal_serial(n: int) -> None:
    rng = random.Random(n)
    for _ in examples(25):
        grid = random_grid(rng)
        shape, kernel, arguments = random_case(rng, n)
        x, w = random_tensor(rng, shape), random_tensor(rng, kernel)
        parameters = [w, random_tensor(rng, kernel[:1])] if rng.random() < 0.5 else [w]

        def function(x, w, b=None, arguments=arguments):
            return FUNCTIONS[n](x, w, b, **arguments)

        layout = random_layout(rng, grid, shape)
        with noted(shape, kernel, arguments, layout, grid):
            agrees(function, [x], parameters, grid, rng, [layout])


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_all_padding_modes_of_convolution_modules(mode: str, n: int) -> None:
    rng = random.Random(7 * n)
    for _ in range(5):
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


@pytest.mark.parallel([3, 4])
def test_a_plane_with_fewer_rows_than_ranks() -> None:
    rng = random.Random(0)
    import distconv as dc

    grid = dc.ProcessGrid(height=-1)
    agrees(
        lambda x, w: F.conv2d(x, w, padding=1),
        [random_tensor(rng, (1, 2, 2, 5))],
        [random_tensor(rng, (3, 2, 3, 3))],
        grid,
        rng,
        [None],
    )
