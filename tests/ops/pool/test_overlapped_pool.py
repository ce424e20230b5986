"""Overlapped pooling equals serial and assembled pooling, saves little, is differentiated again."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import distconv as dc
from distconv.ops.pool import average, maximum
from tests.support.serial import TOLERANCE, agrees, deviation, noted, random_grid, random_tensor

RANKS = [2, 4]
SPATIAL = ("depth", "height", "width")
AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def random_plane(rng: random.Random, n: int) -> list[int]:
    """The shape of a plane that is large beside the windows, and often cut evenly."""
    sizes = ((60, 120), (24, 50), (16, 26))[n - 1]
    plane = [rng.choice([rng.randrange(*sizes), 72 // n]) for _ in range(n)]
    return [rng.choice([1, 2, 3]), rng.choice([1, 2]), *plane]


def random_windows(rng: random.Random, n: int) -> dict[str, Any]:
    """Windows of which blocks often line up."""
    kernel = [rng.choice([1, 2, 3, 3, 3, 5]) for _ in range(n)]
    return dict(
        kernel_size=kernel,
        stride=[rng.choice([1, 1, 2, 2, 3]) for _ in range(n)],
        padding=[k // 2 if k % 2 else 0 for k in kernel],
        ceil_mode=rng.random() < 0.3,
    )


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_overlapped_averages_equal_serial_for_every_divisor(n: int) -> None:
    rng = random.Random(n)
    with mock.patch.object(
        average, "overlapped_linear", wraps=average.overlapped_linear
    ) as overlapped:
        for _ in range(16):
            grid, shape = random_grid(rng, SPATIAL[3 - n :]), random_plane(rng, n)
            arguments = random_windows(rng, n) | dict(count_include_pad=rng.random() < 0.5)
            if n > 1:
                arguments["divisor_override"] = rng.choice([None, None, 3])
            x = random_tensor(rng, shape)

            def function(x: Tensor, a: Any = arguments) -> Tensor:
                with dc.method("overlapped"):
                    return AVERAGE[n](x, **a)

            with noted(shape, arguments, grid):
                agrees(function, [x], [], grid, rng, [None])
    assert overlapped.call_count >= 3


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("indices", [False, True])
def test_overlapped_maxima_equal_serial_with_ties_and_nan(n: int, indices: bool) -> None:
    rng = random.Random(n)
    with mock.patch.object(
        maximum, "overlapped_maxima", wraps=maximum.overlapped_maxima
    ) as overlapped:
        for _ in range(20):
            grid, shape = random_grid(rng, SPATIAL[3 - n :]), random_plane(rng, n)
            arguments = random_windows(rng, n)
            # torch pads by no more than half the kernel, so that dilated windows do not line up
            # along what is cut.
            arguments["dilation"] = [rng.choice([1, 1, 1, 1, 2]) for _ in range(n)]
            x = random_tensor(rng, shape)
            lower = torch.full_like(x, rng.choice([-torch.inf, torch.nan]))
            values = x, x.round(), -1 - x.abs(), torch.zeros_like(x), torch.where(x > 1, x, lower)
            x = rng.choice(values)

            def function(x: Tensor, a: Any = arguments) -> Tensor:
                with dc.method("overlapped"):
                    return MAX[n](x, return_indices=indices, **a)

            with noted(shape, arguments, grid):
                agrees(function, [x], [], grid, rng, [None])
    assert overlapped.call_count >= 3


def both(function: Any, x: Tensor, grid: dc.ProcessGrid) -> list[list[Tensor]]:
    """Result and gradient by each method."""
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
    """Bytes that autograd keeps in an overlapped call, without those of the input."""
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
