"""Overlapped pooling equals assembled pooling, keeps little memory, and is differentiable twice."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import distconv as dc
from tests.support.serial import TOLERANCE, agrees, deviation, random_grid, random_tensor


def both(function: Any, x: Tensor, grid: dc.ProcessGrid) -> list[list[Tensor]]:
    """Return result and gradient by each method."""
    results = []
    for method in ("assembled", "overlapped"):
        d = dc.distribute_tensor(x, grid).requires_grad_(x.is_floating_point())
        with dc.method(method):
            y = function(d)
        y = y[0] if isinstance(y, tuple) else y
        results.append([y.detach().full_tensor()])
        if x.is_floating_point():
            y.backward(torch.ones_like(y.detach()) / 3)
            results[-1].append(d.grad.full_tensor())
    return results


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64])
def test_averages_of_other_types_are_those_of_the_assembled_method(dtype: torch.dtype) -> None:
    rng = random.Random(2)
    for arguments in ((3, 1, 1), (3, 2, 1), (3, 1, 1, False, False), (3, 2, 0, True)):
        grid = random_grid(rng, ("height", "width"))
        x = (100 * random_tensor(rng, (2, 3, 26, 24))).to(dtype)
        small = 0.0 if dtype == torch.int64 else 4 * torch.finfo(dtype).eps
        assembled, overlapped = both(lambda x, a=arguments: F.avg_pool2d(x, *a), x, grid)
        for got, wanted in zip(overlapped, assembled, strict=True):
            assert deviation(got, wanted) <= small


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_maxima_are_exactly_those_of_the_assembled_method(dtype: torch.dtype) -> None:
    rng = random.Random(2)
    for arguments in ((3, 1, 1), (3, 2, 1), (3, 2, 0, 1, True), (3, 1, 0, 2)):
        grid = random_grid(rng, ("height", "width"))
        x = random_tensor(rng, (2, 3, 26, 24)).round().to(dtype)
        assembled, overlapped = both(lambda x, a=arguments: F.max_pool2d(x, *a), x, grid)
        assert torch.equal(assembled[0], overlapped[0])
        assert deviation(overlapped[1], assembled[1]) <= 4 * torch.finfo(dtype).eps


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
