"""Overlapped convolutions save halos only, and can be differentiated again."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import distconv as dc
from distconv.device import kinds
from tests.support.serial import TOLERANCE, agrees, deviation, random_grid, random_tensor


def bytes_saved(x: dc.DistTensor, w: Tensor) -> int:
    """Return the bytes that a convolution keeps for its gradients beside `x` and `w`."""
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        F.conv2d(x, w, padding=1)
    others = {t.untyped_storage().data_ptr() for t in (x.shard, w)}
    return sum(size for place, size in kept.items() if place not in others)


@pytest.mark.parallel([2, 4])
def test_only_halos_are_saved_beside_the_input() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = dc.distribute_tensor(torch.randn(1, 4, 64, 16), grid).requires_grad_()
    w = torch.randn(4, 4, 3, 3, requires_grad=True)
    sides = 1 + (0 < grid.rank < grid.size - 1)
    with dc.method("overlapped"):
        assert bytes_saved(x, w) == sides * 4 * 16 * 4


@pytest.mark.parallel(2)
def test_small_blocks_are_assembled_where_nobody_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    few = kinds.HOST._replace(overlapped=32 * 17)
    monkeypatch.setattr(kinds, "HOST", few)
    grid = dc.ProcessGrid(height=-1)
    w = torch.randn(1, 1, 3, 3, requires_grad=True)
    small, large = (
        dc.distribute_tensor(torch.randn(1, 1, rows, 17), grid).requires_grad_()
        for rows in (62, 64)
    )
    assert bytes_saved(small, w) == (1 + 31 + 1) * 17 * 4  # padding, block, halo
    assert bytes_saved(large, w) == 17 * 4


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
            assert deviation(got, wanted) <= TOLERANCE


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
        checkpoint(parallel, first[:, :2], use_reentrant=False).square().sum().backward()
    wanted = x.requires_grad_()
    model(model(wanted)[:, :2]).square().sum().backward()
    assert deviation(d.grad.full_tensor(), wanted.grad) <= TOLERANCE


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("name", ["assembled", "overlapped"])
def test_a_checkpoint_that_computes_again_by_another_method_is_an_error(name: str) -> None:
    grid = dc.ProcessGrid(height=-1)
    layer = nn.Conv2d(2, 3, 3, padding=1)
    d = dc.distribute_tensor(random_tensor(random.Random(0), (1, 2, 18, 7)), grid)
    with dc.method(name):
        y = checkpoint(
            dc.parallelize(layer.double(), grid), d.requires_grad_(), use_reentrant=False
        )
    other = {"assembled": "overlapped", "overlapped": "assembled"}[name]
    with dc.method(other), pytest.raises(CheckpointError):
        y.sum().backward()


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
        assert wanted is None or deviation(t.grad, wanted) <= TOLERANCE
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
