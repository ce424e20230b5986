"""Overlapped convolutions equal serial, save halos only, and can be differentiated again."""

from __future__ import annotations

import copy
import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import distconv as dc
from distconv.ops.conv import spatial
from tests.support.serial import (
    TOLERANCE,
    agrees,
    deviation,
    noted,
    random_grid,
    random_tensor,
    summed,
)

RANKS = [2, 3, 8]
FUNCTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def random_case(rng: random.Random, n: int) -> tuple[list[int], list[int], dict[str, Any]]:
    """Planes that are large beside the windows, and padded so that blocks line up."""
    stride = [rng.choice([1, 1, 1, 2, 3]) for _ in range(n)]
    kernel = [rng.choice([1, 2, 3, 5]) if s > 1 else rng.choice([1, 3, 3, 5]) for s in stride]
    dilation = [rng.choice([1, 1, 1, 2]) for _ in range(n)]
    padding = [d * (k - 1) // 2 for k, d in zip(kernel, dilation, strict=True)]
    groups = rng.choice([1, 1, 2])
    plane = [rng.randrange(*((60, 120), (24, 50), (16, 26))[n - 1]) for _ in range(n)]
    arguments = dict(stride=stride, padding=padding, dilation=dilation, groups=groups)
    return [rng.choice([1, 2, 3]), 2 * groups, *plane], [2 * groups, 2, *kernel], arguments


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_overlapped_convolutions_equal_serial(n: int) -> None:
    rng = random.Random(n)
    with mock.patch.object(
        spatial, "overlapped_linear", wraps=spatial.overlapped_linear
    ) as overlapped:
        for i in range(16):
            grid = random_grid(rng, ("depth", "height", "width")[3 - n :])
            shape, kernel, arguments = random_case(rng, n)
            x, w = random_tensor(rng, shape), random_tensor(rng, kernel)
            parameters = [w, random_tensor(rng, kernel[:1])] if i % 2 else [w]

            def function(x: Tensor, w: Tensor, b: Any = None, a: Any = arguments) -> Tensor:
                with dc.method("overlapped"):
                    return FUNCTIONS[n](x, w, b, **a)

            with noted(shape, kernel, arguments, grid):
                agrees(function, [x], parameters, grid, rng, [None])
    assert overlapped.call_count >= 3


def random_transposed_case(
    rng: random.Random, n: int
) -> tuple[list[int], list[int], dict[str, Any]]:
    """Planes that are mostly upsampled by a whole factor, and evenly or unevenly cut."""
    stride = [rng.choice([1, 2, 2, 3]) for _ in range(n)]
    kernel = [s + rng.choice([0, 1, 2, 2, 3]) for s in stride]
    dilation = [rng.choice([1, 1, 1, 2]) for _ in range(n)]
    reach = [d * (k - 1) + 1 - s for k, d, s in zip(kernel, dilation, stride, strict=True)]
    padding = [max(r, 0) // 2 for r in reach]
    extra = [r % 2 if s > 1 else 0 for r, s in zip(reach, stride, strict=True)]
    groups = rng.choice([1, 1, 2])
    plane = [rng.randrange(*((40, 80), (16, 33), (8, 17))[n - 1]) for _ in range(n)]
    arguments = dict(
        stride=stride, padding=padding, output_padding=extra, dilation=dilation, groups=groups
    )
    return [rng.choice([1, 2, 3]), 2 * groups, *plane], [2 * groups, 2, *kernel], arguments


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_overlapped_transposed_convolutions_equal_serial(n: int) -> None:
    rng = random.Random(n)
    with mock.patch.object(
        spatial, "overlapped_linear", wraps=spatial.overlapped_linear
    ) as overlapped:
        for i in range(16):
            grid = random_grid(rng, ("depth", "height", "width")[3 - n :])
            shape, kernel, arguments = random_transposed_case(rng, n)
            x, w = random_tensor(rng, shape), random_tensor(rng, kernel)
            filters = 2 * arguments["groups"]
            parameters = [w, random_tensor(rng, [filters])] if i % 2 else [w]

            def function(x: Tensor, w: Tensor, b: Any = None, a: Any = arguments) -> Tensor:
                with dc.method("overlapped"):
                    return TRANSPOSED[n](x, w, b, **a).relu_()

            with noted(shape, kernel, arguments, grid):
                agrees(function, [x], parameters, grid, rng, [None])
    assert overlapped.call_count >= 3


@pytest.mark.parallel([2, 4])
def test_only_halos_are_saved_beside_the_input() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = dc.distribute_tensor(torch.randn(1, 4, 64, 16), grid).requires_grad_()
    w = torch.randn(4, 4, 3, 3, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with dc.method("overlapped"), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        F.conv2d(x, w, padding=1)
    for t in (x.shard, w):
        del kept[t.untyped_storage().data_ptr()]
    sides = 1 + (0 < grid.rank < grid.size - 1)
    assert sum(kept.values()) == sides * 4 * 16 * 4


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize(
    "convolve",
    [
        lambda x, w: F.conv2d(x, w, padding=1),
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1),
    ],
    ids=["convolution", "transposed"],
)
def test_second_derivatives_are_the_serial_ones(convolve: Any) -> None:
    rng = random.Random(5)
    for _ in range(3):
        grid = random_grid(rng, ("height", "width"))
        x, w = random_tensor(rng, (2, 2, 16, 14)), random_tensor(rng, (2, 2, 3, 3))

        def product(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            with dc.method("overlapped"):
                loss = convolve(x, w).tanh().square().sum()
                g, h = torch.autograd.grad(loss, [x, w], create_graph=True)
                return torch.autograd.grad((g * x).sum() + (h * w).sum(), [x, w])

        expected = product(x.requires_grad_(), w.requires_grad_())
        actual = product(dc.distribute_tensor(x.detach(), grid).requires_grad_(), w)
        for got, wanted in zip(actual, expected, strict=True):
            if isinstance(got, dc.DistTensor):
                got = got.full_tensor()
            assert deviation(got.detach(), wanted) <= TOLERANCE


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("name", ["assembled", "overlapped"])
def test_a_checkpoint_computes_again_by_the_chosen_method(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.MaxPool2d(3, 1, 1), nn.Conv2d(3, 3, 3, padding=1)
    ).double()
    grid = dc.ProcessGrid(height=-1)
    x = random_tensor(random.Random(0), (1, 2, 18, 7))
    d = dc.distribute_tensor(x, grid).requires_grad_()
    parallel = dc.parallelize(copy.deepcopy(model), grid)
    with dc.method(name):
        first = checkpoint(parallel, d, use_reentrant=False)
    # One for which nothing was chosen goes its own way.
    second = checkpoint(parallel, first[:, :2], use_reentrant=False)
    second.square().sum().backward()
    wanted = x.requires_grad_()
    model(model(wanted)[:, :2]).square().sum().backward()
    assert deviation(d.grad.full_tensor(), wanted.grad) <= TOLERANCE


@pytest.mark.parallel([2, 3])
def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="choose from assembled, overlapped"), dc.method("fast"):
        pass


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("needed", [(True, False), (False, True), (False, False)])
def test_gradients_that_nobody_needs_are_not_computed(needed: tuple[bool, bool]) -> None:
    rng = random.Random(6)
    grid = dc.ProcessGrid(height=-1)
    x, w = random_tensor(rng, (2, 2, 16, 5)), random_tensor(rng, (3, 2, 3, 3))
    b = random_tensor(rng, (3,)).requires_grad_()
    x.requires_grad_(needed[0])
    w.requires_grad_(needed[1])
    d = dc.distribute_tensor(x.detach(), grid)
    d.requires_grad_(needed[0])
    F.conv2d(x, w, b, padding=1).sin().sum().backward()
    expected = [t.grad for t in (w, b)]
    w.grad = b.grad = None
    with dc.method("overlapped"):
        F.conv2d(d, w, b, padding=1).sin().sum().backward()
    for t, wanted in zip((w, b), expected, strict=True):
        assert (t.grad is None) == (wanted is None)
        assert wanted is None or deviation(summed(t.grad, t.detach()), wanted) <= TOLERANCE
    assert (d.grad is None) == (x.grad is None)
    assert x.grad is None or deviation(d.grad.full_tensor(), x.grad) <= TOLERANCE


@pytest.mark.parallel([2, 3])
def test_complex_convolutions_equal_serial() -> None:
    rng = random.Random(7)
    x, w = ((random_tensor(rng, s), random_tensor(rng, s)) for s in ((1, 2, 16, 5), (3, 2, 3, 3)))
    x, w = torch.complex(*x), torch.complex(*w)
    d = dc.distribute_tensor(x, dc.ProcessGrid(height=-1))
    with dc.method("overlapped"):
        y = F.conv2d(d, w, padding=1).full_tensor()
    torch.testing.assert_close(y, F.conv2d(x, w, padding=1))


@pytest.mark.parallel([3, 4])
def test_ranks_without_samples_take_part() -> None:
    rng = random.Random(8)
    grid = (
        dc.ProcessGrid(depth=-1) if MPI.COMM_WORLD.size == 3 else dc.ProcessGrid(depth=2, height=2)
    )
    x, w = random_tensor(rng, (1, 2, 24, 5)), random_tensor(rng, (3, 2, 3, 3))
    for layout in (dc.Layout(sample="depth", height="height"), dc.Layout(sample="height")):

        def function(x: Tensor, w: Tensor) -> Tensor:
            with dc.method("overlapped"):
                return F.conv2d(x, w, padding=1)

        agrees(function, [x], [w], grid, rng, [layout])
