"""Dimensions change places, and numbers are assigned where masks choose, as serially."""

from __future__ import annotations

import random

import pytest
import torch

import distconv as dc
from tests.support.serial import (
    agrees,
    deviation,
    examples,
    raises_alike,
    random_grid,
    random_layout,
    random_tensor,
)

RANKS = [1, 2, 4]


def random_shape(rng: random.Random) -> list[int]:
    return [rng.randrange(1, 8) for _ in range(rng.choice([1, 2, 3, 4]))]


@pytest.mark.parallel([1, 2, 4])
def test_dimensions_change_places() -> None:
    rng = random.Random(4)
    x = random_tensor(rng, (2, 3, 4, 5))
    for function in (
        lambda x: x.movedim(1, -1),
        lambda x: torch.moveaxis(x, (0, 2), (3, 1)),
        lambda x: x.mT,
        lambda x: x[0, 0].T,
        lambda x: x[0, :, 0].t(),
        torch.fliplr,
        torch.flipud,
    ):
        agrees(function, [x], [], random_grid(rng), rng)


@pytest.mark.parallel(RANKS)
def test_assignment_of_numbers_where_a_mask_is_true() -> None:
    rng = random.Random(6)
    for _ in examples(15):
        shape = random_shape(rng)
        x, other = random_tensor(rng, shape), random_tensor(rng, shape)
        first = random_tensor(rng, shape[: rng.randrange(len(shape) + 1)])

        def own(x, other):
            y = x * other
            y[other > 0] = 7
            y[y < -0.5] = -torch.inf
            return y, y.clamp(min=-1) * x

        def of_the_first_dimensions(x, first):
            y = x * 2
            y[first > 0] = True
            return y * x

        def of_integers(x, first):
            y = (4 * x).long()
            y[first <= 0] = 2.7
            return y

        agrees(own, [x, other], [], random_grid(rng), rng)
        agrees(own, [x], [other], random_grid(rng), rng)
        for function in (of_the_first_dimensions, of_integers):
            agrees(function, [x, first], [], random_grid(rng), rng)
            agrees(function, [x], [first], random_grid(rng), rng)


@pytest.mark.parallel(RANKS)
def test_assignment_where_masks_and_positions_pick_elements() -> None:
    rng = random.Random(8)
    x, values = random_tensor(rng, (5, 4, 3)), random_tensor(rng, (5, 4, 3))
    one, places = random_tensor(rng, ()), torch.tensor([3, 0, -1])

    def by_a_mask(x, values):
        y = x * 2
        y[x > 0] = values[x > 0]
        return y * x

    def of_one_value(x, one):
        y = x.sin()
        y[..., x[0, 0] > 0] = one
        return y * x

    def by_positions(x, values):
        y = x * 1.5
        y[:, places] = values[:, :3]
        y[[4, 1], 2:, [0, 2]] = 7.0
        return y * x

    def before_autograd(x, values):
        y = x.detach().clone()
        y[values > 0] = values.detach()[values > 0]
        return y * x

    for _ in examples(6):
        for function in (by_a_mask, by_positions, before_autograd):
            agrees(function, [x, values], [], random_grid(rng), rng)
            agrees(function, [x], [values], random_grid(rng), rng)
        agrees(of_one_value, [x, one], [], random_grid(rng), rng)


@pytest.mark.parallel(RANKS)
def test_a_plain_tensor_is_assigned_what_is_made_whole_on_every_rank() -> None:
    rng = random.Random(9)
    grid, whole = random_grid(rng), random_tensor(rng, (5, 4))
    x = dc.distribute_tensor(whole, grid, random_layout(rng, grid, whole.shape))

    def written(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(5, 4, dtype=torch.float64)
        y[1:3] = x[2:4]
        y[0, 2] = x.sum()
        y[x > 1] = 7.0
        return y

    actual, expected = written(x), written(whole)
    assert type(actual) is torch.Tensor and deviation(actual, expected) <= 1e-12


@pytest.mark.parallel([1, 2, 3])
def test_assignments_that_cannot_be_made_raise_as_in_serial() -> None:
    rng = random.Random(7)
    x, plain = random_tensor(rng, (4, 3)), torch.ones(4, 3, dtype=torch.float64)
    for function in (
        lambda x: x.__setitem__(plain[:, :2] > 0, 1.0),
        lambda x: x.__setitem__(plain[:1] > 0, 1.0),
        lambda x: x.__setitem__(plain.unsqueeze(0) > 0, 1.0),
        lambda x: x.__setitem__(x > 0, 1.0j),
        lambda x: x.detach().requires_grad_().__setitem__(x > 0, 1.0),
    ):
        raises_alike(function, [x], [], random_grid(rng), rng)
