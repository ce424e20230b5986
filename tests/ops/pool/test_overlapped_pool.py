"""Overlapped pooling keeps little memory and is differentiable twice; see also test_properties."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import distconv as dc
from tests.support.serial import TOLERANCE, agrees, deviation, random_grid, random_tensor


def kept_by(function: Any, x: dc.DistTensor) -> int:
    """Return the bytes that autograd keeps in an overlapped call, without those of the input."""
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with dc.method("overlapped"), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        function(x)
    kept.pop(x.shard.untyped_storage().data_ptr(), None)
    return sum(kept.values())


@pytest.mark.parallel([2, 4])
def test_an_average_keeps_nothing() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = dc.distribute_tensor(torch.randn(1, 4, 64, 16), grid).requires_grad_()
    assert kept_by(lambda x: F.avg_pool2d(x, 3, 1, 1), x) == 0


@pytest.mark.parallel([2, 4])
def test_a_maximum_keeps_places_alone() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = dc.distribute_tensor(torch.randn(1, 4, 64, 16), grid).requires_grad_()
    sides = 1 + (0 < grid.rank < grid.size - 1)
    places = x.shard.numel() + sides * 4 * 16
    assert kept_by(lambda x: F.max_pool2d(x, 3, 1, 1), x) == 8 * places


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
        lambda x: F.max_pool2d(x, 3, 1, 1),
        lambda x: F.max_pool1d(x[:, :, :, 0], 5, 1, 2),
    ],
    ids=["average", "maximum", "maximum of signals"],
)
def test_second_derivatives_are_the_serial_ones(function: Any) -> None:
    rng = random.Random(5)
    for _ in range(3):
        grid, x = random_grid(rng, ("height", "width")), random_tensor(rng, (2, 2, 16, 14))

        def product(x: Tensor) -> Tensor:
            with dc.method("overlapped"):
                loss = function(x).tanh().square().sum()
                (g,) = torch.autograd.grad(loss, [x], create_graph=True)
                return torch.autograd.grad((g * x).sum(), [x])[0]

        expected = product(x.requires_grad_())
        actual = product(dc.distribute_tensor(x.detach(), grid).requires_grad_())
        assert deviation(actual.full_tensor(), expected) <= TOLERANCE


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.avg_pool2d(x, 3, 1, 1),
        lambda x: F.avg_pool1d(x[:, :, :, 0], 3, 1, 1),
        lambda x: F.max_pool2d(x, 3, 1, 1),
        lambda x: F.max_pool1d(x[:, :, :, 0], 3, 1, 1),
    ],
)
def test_ranks_without_samples_or_channels_take_part(function: Any) -> None:
    rng = random.Random(8)
    n = dc.ProcessGrid(height=-1).size
    spare = {2: {}, 3: {}, 4: {"channel": 2}}[n]
    grid = dc.ProcessGrid(**spare, height=-1)
    for layout, shape in (
        (dc.Layout(sample="channel", height="height"), (1, 2, 24, 5)),
        (dc.Layout(channel="channel", height="height"), (2, 1, 24, 5)),
        (dc.Layout(height="height"), (0, 2, 24, 5)),
    ):

        def call(x: Tensor) -> Tensor:
            with dc.method("overlapped"):
                return function(x).relu_()

        agrees(call, [random_tensor(rng, shape)], [], grid, rng, [layout])
