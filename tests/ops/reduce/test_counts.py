"""Counts of elements, where their bounds are those of all ranks' elements."""

from __future__ import annotations

import random

import pytest
import torch

import distconv as dc
from tests.support.serial import agrees, noted, raised_everywhere, random_grid, random_tensor


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("shape", [(9,), (3, 5), (1, 2, 7)])
def test_a_histogram_without_bounds_takes_those_of_all_elements(shape: tuple[int, ...]) -> None:
    rng = random.Random(str(shape))
    grid = random_grid(rng)
    x = random_tensor(rng, shape)
    for values in (x, torch.ones_like(x), x.float()):
        with noted(values):
            agrees(lambda y: torch.histc(y.detach(), 5), [values], [], grid, rng)
            agrees(lambda y: torch.histogram(y.detach(), 5), [values], [], grid, rng)


@pytest.mark.parallel([1, 2])
def test_elements_that_cannot_be_counted_are_an_error_on_every_rank() -> None:
    grid = dc.ProcessGrid(sample=-1)
    x = torch.arange(6.0)
    x[5] = torch.inf
    raised_everywhere(RuntimeError, torch.histc, dc.distribute_tensor(x, grid))
    negative = dc.distribute_tensor(torch.arange(6) - 1, grid)
    raised_everywhere(RuntimeError, torch.bincount, negative)


@pytest.mark.parallel([1, 2, 3])
def test_nothing_and_one_element_are_counted() -> None:
    grid = dc.ProcessGrid(sample=-1)
    rng = random.Random(1)
    for n in (0, 1):
        with noted(n):
            agrees(lambda x: torch.histogram(x.detach(), 2), [torch.ones(n)], [], grid, rng)
            numbers = torch.arange(n) + 2
            agrees(lambda x: torch.bincount(x, minlength=2), [numbers], [], grid, rng)
            agrees(torch.count_nonzero, [numbers], [], grid, rng)
