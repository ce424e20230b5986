"""Pooling of integers, of the lowest values, and back; see also `windowed/test_properties`."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import distconv as dc
from tests.support.serial import agrees, noted, random_grid, random_tensor

MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
UNPOOLS = {1: F.max_unpool1d, 2: F.max_unpool2d, 3: F.max_unpool3d}


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
    windows = (2, None), (3, 2, 1, 1, True), (3, 1, 1, 2), (2, 3, 1, 1, True), (4, 2, 2, 1, False)
    for arguments in windows:
        for share in (-9, 0, 1):
            x = random_tensor(rng, (2, 2, *(9, 8, 7)[:n])).round()
            x = torch.where(random_tensor(rng, x.shape) > share, -torch.inf, x)

            def pooled(x: Tensor, arguments: Any = arguments) -> Any:
                names = "kernel_size", "stride", "padding", "dilation", "ceil_mode"
                given = dict(zip(names, arguments, strict=False))
                return MAX[n](x, return_indices=indices, **given)

            with noted(arguments, share):
                agrees(pooled, [x], [], random_grid(rng), rng)


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("axis", ["sample", "height", "width"])
@pytest.mark.parametrize("n", [2, 3])
def test_windows_of_padding_only_have_serial_maxima_and_neither_places_nor_gradients(
    n: int, axis: str
) -> None:
    grid = dc.ProcessGrid(**{axis: -1})
    x = torch.arange(2 * 3 * 4.0**n).view(2, 3, *(4,) * n)
    # The window at -1 has taps at -1 and 4, and the one at 2 at 2 and 7.
    arguments: dict[str, Any] = dict(kernel_size=2, stride=3, padding=1, dilation=5)
    serial, pooled = MAX[n](x, **arguments), MAX[n](dc.distribute_tensor(x, grid), **arguments)
    assert torch.equal(pooled.full_tensor(), serial) and serial.isinf().any()
    for leaf, indices in ((False, True), (True, False), (True, True)):
        d = dc.distribute_tensor(x, grid).requires_grad_(leaf)
        with pytest.raises(dc.UnsupportedOperation, match="dilation=.5, 5.* covers padding only"):
            MAX[n](d, return_indices=indices, **arguments)


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


@pytest.mark.gpu
@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_unpooling_what_was_pooled_moves_halos_only(n: int) -> None:
    grid = dc.ProcessGrid(width=-1)
    x = torch.randn(2, 3, *(12 + d for d in range(n)), dtype=torch.float64).to(grid.device)
    d = dc.distribute_tensor(x, grid).requires_grad_()
    x.requires_grad_()
    dc.redistributions(reset=True)
    for y in (x, d):
        values, indices = MAX[n](y, 3, stride=2, return_indices=True)
        made = UNPOOLS[n](values * 2, indices, 3, 2, output_size=x.shape[2:])
        made.pow(2).sum().backward()
    assert dc.redistributions() == []
    torch.testing.assert_close(d.grad.full_tensor(), x.grad, rtol=1e-13, atol=0)


@pytest.mark.gpu
@pytest.mark.parallel([2, 3])
def test_indices_far_from_their_windows_are_found() -> None:
    grid = dc.ProcessGrid(height=-1)
    with grid.device:
        x = torch.arange(1.0, 17).reshape(1, 1, 4, 4)
        indices = torch.arange(64).flip(0)[::4].reshape(1, 1, 4, 4)
    made = F.max_unpool2d(dc.distribute_tensor(x, grid), indices, 2)
    torch.testing.assert_close(made.full_tensor(), F.max_unpool2d(x, indices, 2))


@pytest.mark.parallel([2, 4])
def test_adaptive_maxima_of_no_samples_with_fewer_channels_than_ranks_equal_serial() -> None:
    layout = [dc.Layout(channel="channel")]
    for shape in ((0, 1, 5, 3), (0, 3, 6)):
        pool = F.adaptive_max_pool2d if len(shape) == 4 else F.adaptive_max_pool1d
        grid, rng = dc.ProcessGrid(channel=-1), random.Random(2)
        agrees(lambda x, pool=pool: pool(x, 1), [torch.zeros(shape)], [], grid, rng, layout)


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("axis", ["sample", "channel", "height"])
def test_averages_without_outputs_leave_no_rank_waiting_in_the_backward_pass(axis: str) -> None:
    # One sample, two channels: some ranks have no inputs, where torch's gradient does not raise.
    grid = dc.ProcessGrid(**{axis: -1})
    x = dc.distribute_tensor(torch.ones(1, 2, 4, 1), grid).requires_grad_()
    for y in (F.adaptive_avg_pool2d(x, (3, 0)), F.interpolate(x, scale_factor=0.3, mode="area")):
        assert y.numel() == 0
        y.sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.zeros(1, 2, 4, 1))
