"""Pooling of integers, and ranks without elements; see also `windowed/test_properties`."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import distconv as dc
from tests.support.serial import (
    agrees,
    examples,
    noted,
    random_grid,
    random_layout,
    random_tensor,
)

MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def random_plane(rng: random.Random, n: int, smallest: int = 5) -> Tensor:
    """Draw values that are all negative, or equal in many places, or any: hard cases of maxima."""
    shape = (
        rng.choice([1, 2, 3]),
        rng.choice([1, 2, 3]),
        *(rng.randrange(smallest, 13) for _ in range(n)),
    )
    x = random_tensor(rng, shape)
    return rng.choice([x, -1 - x.abs(), x.relu(), x.round(), torch.zeros_like(x)])


def random_windows(rng: random.Random, n: int, dilated: bool) -> dict[str, Any]:
    kernel = [rng.choice([1, 2, 3, 4]) for _ in range(n)]
    arguments: dict[str, Any] = dict(
        kernel_size=kernel,
        stride=rng.choice([None, [rng.choice([1, 2, 3, 5]) for _ in range(n)]]),
        padding=[rng.randrange(k // 2 + 1) for k in kernel],
        ceil_mode=rng.random() < 0.5,
    )
    if dilated:
        arguments["dilation"] = [rng.choice([1, 1, 2]) for _ in range(n)]
    return arguments


@pytest.mark.parallel([1, 2])
def test_average_pooling_of_integers_equals_serial() -> None:
    rng = random.Random(1)
    x = torch.arange(2 * 3 * 7 * 6).reshape(2, 3, 7, 6)
    for arguments in ((2,), (3, 1, 1), (3, 2, 1, True, False), (2, 2, 0, False, True, 3)):
        agrees(lambda x, a=arguments: F.avg_pool2d(x, *a), [x], [], random_grid(rng), rng)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("indices", [False, True])
def test_windows_of_nothing_but_the_lowest_value_take_their_first_element(
    n: int, indices: bool
) -> None:
    rng = random.Random(n)
    for _ in examples(20):
        grid, x, arguments = random_grid(rng), random_plane(rng, n, 7), random_windows(rng, n, True)
        x = torch.where(random_tensor(rng, x.shape) > rng.choice([-9, 0, 1]), -torch.inf, x)
        layout = random_layout(rng, grid, x.shape)
        with noted(tuple(x.shape), arguments, layout, grid):
            agrees(
                lambda x, a=arguments: MAX[n](x, return_indices=indices, **a),
                [x],
                [],
                grid,
                rng,
                [layout],
            )


@pytest.mark.parallel([2])
def test_places_are_right_where_a_buffer_is_as_wide_as_the_plane_and_starts_within() -> None:
    x = torch.arange(12.0).view(1, 1, 2, 6)
    grid = dc.ProcessGrid(width=2)
    arguments: dict[str, Any] = dict(
        kernel_size=(1, 3), stride=1, padding=(0, 1), dilation=(1, 2), return_indices=True
    )
    _, expected = F.max_pool2d(x, **arguments)
    _, places = F.max_pool2d(dc.distribute_tensor(x, grid), **arguments)
    assert torch.equal(places.full_tensor(), expected)


@pytest.mark.parallel([2])
def test_a_maximum_keeps_places_and_no_copy_of_its_inputs() -> None:
    x = dc.distribute_tensor(torch.randn(1, 4, 64, 16), dc.ProcessGrid(height=2)).requires_grad_()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes), lambda t: t):
        y = F.max_pool2d(x, 3, 1, 1)
    assert sum(kept) < 9 * y.shard.numel(), "the places, and what is small"
