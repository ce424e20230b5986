"""Positions of interpolation are rounded as torch rounds them; see also test_properties."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import distconv as dc
from distconv.device.kinds import accelerator
from distconv.geometry.resampling import Resampled
from distconv.ops.interpolate import _MODES
from distconv.torch_private import upsampling
from tests.support.serial import agrees, random_grid, random_tensor, refused

pytestmark = pytest.mark.gpu


@pytest.mark.parallel([4])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest_positions_round_as_torch_rounds_them(mode: str) -> None:
    rng = random.Random(5)
    for size in (300, 517, 1000):
        grid = random_grid(rng, ["height", "width"])
        x = random_tensor(rng, (1, 1, size, 7))

        def function(x, size=size):
            return F.interpolate(x, size=(size * 7 // 3 + 1, 5), mode=mode)

        agrees(function, [x], [], grid, rng, [None])


@pytest.mark.parallel([4])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_single_precision_agrees_to_the_rounding_of_positions(mode: str) -> None:
    rng = random.Random(6)
    grid = random_grid(rng, ["height", "width"])
    x = random_tensor(rng, (1, 1, 517, 7), torch.float32)

    def function(x):
        return F.interpolate(x, size=(1207, 5), mode=mode)

    agrees(function, [x], [], grid, rng, [None], tolerance=517 * 2**-22)


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_a_factor_a_rounding_error_away_is_exact_or_refused(n: int, mode: str) -> None:
    rng = random.Random(n)
    compared = 0
    for factor in (2.0, 2.0 + 1e-6, 2.0 - 1e-6, 2.0 + 1e-12, 1.1, 2.1, 1.0 + 1e-7):
        for size in (3, 5, 9):
            x = random_tensor(rng, (2, 3, *[size] * n), rng.choice([torch.float32, torch.float64]))

            def function(x, factor=factor):
                return F.interpolate(x, scale_factor=factor, mode=mode)

            try:
                agrees(function, [x], [], random_grid(rng), rng, tolerance=1e-6)
                compared += 1
            except dc.UnsupportedOperation:
                assert (n != 2 or accelerator()) and factor not in (1.0, 2.0)
    assert compared == 21 or ((n != 2 or accelerator()) and compared >= 6)


@pytest.mark.parametrize(
    ("mode", "planar", "size", "outputs", "scale", "on_cpu", "on_gpu"),
    [
        # A ratio of 2 is taken for what it is on CPUs, and 1 on planes of GPUs.
        ("nearest", True, 3, 6, 2.0 + 1e-6, [0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, 2]),
        ("nearest-exact", True, 9, 9, 1.1, [0, 1, 2, 3, 4, 5, 5, 6, 7], [*range(9)]),
        ("nearest-exact", False, 9, 9, 1.1, *[[0, 1, 2, 3, 4, 5, 5, 6, 7]] * 2),
        ("nearest", True, 4, 4, 1.1, [0, 1, 2, 3], [0, 1, 2, 3]),
        ("nearest", False, 4, 4, 1.1, [0, 1, 2, 3], [0, 0, 1, 2]),
    ],
)
def test_accelerators_find_the_nearest_inputs_by_their_own_rule(
    mode: str,
    planar: bool,
    size: int,
    outputs: int,
    scale: float,
    on_cpu: list[int],
    on_gpu: list[int],
) -> None:
    for accelerated, expected in ((False, on_cpu), (True, on_gpu)):
        r = Resampled(outputs, scale, mode, accelerator=accelerated, planar=planar)
        assert r.taps(size, 0, outputs)[0][:, 0].tolist() == expected
    if planar:
        x = torch.arange(float(size)).view(1, 1, size, 1)
        kernel = upsampling(mode, False, 2)
        assert kernel(x, [outputs, 1], scale, 1.0)[0, 0, :, 0].tolist() == on_cpu


def test_gradients_of_other_inputs_are_noticed_on_accelerators() -> None:
    def ambiguous(outputs: int, scale: float | None, size: int, mode: str = "nearest") -> bool:
        return Resampled(outputs, scale, mode, accelerator=True).ambiguous(size)

    # Output 1 has input 1, and its gradient goes to input 0: ceil(1.1) = 2.
    assert ambiguous(9, 1.1, 9)
    for size in (3, 5, 64, 100):
        for factor in (1, 2, 3, 4):
            for mode in ("nearest", "nearest-exact"):
                assert not ambiguous(factor * size, float(factor), size, mode)
                assert not ambiguous(factor * size, None, size, mode)


@pytest.mark.parallel(2)
def test_what_accelerators_compute_otherwise_is_refused_on_cut_planes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid = dc.ProcessGrid(height=2)
    x = dc.distribute_tensor(torch.arange(81.0).view(1, 1, 9, 9), grid)
    monkeypatch.setitem(vars(grid), "computes_on_gpu", True)
    with pytest.raises(dc.UnsupportedOperation, match=r"from \(9, 9\) to \(9, 9\)"):
        F.interpolate(x, scale_factor=1.1)
    whole = x.redistribute(dc.Layout())
    assert F.interpolate(whole, scale_factor=1.1).shape == (1, 1, 9, 9)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
@pytest.mark.parametrize("factor", [3.0, 1.25, 2 / 3])
def test_whole_periods_take_torchs_kernels_and_keep_the_memory_format(
    mode: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_to_gather(*arguments):
        raise AssertionError("a gather of indices")

    monkeypatch.setattr("distconv.ops.interpolate._taps", refuse_to_gather)
    grid = dc.ProcessGrid(height=-1)
    x = torch.randn(1, 3, 37, 5, dtype=torch.float64)
    x = x.to(grid.device, memory_format=torch.channels_last)
    y = dc.distribute_tensor(x, grid).requires_grad_()
    made = F.interpolate(y, scale_factor=factor, mode=mode)
    made.sum().backward()
    for block in (made.shard, y.grad.shard):
        assert block.is_contiguous(memory_format=torch.channels_last)
    expected = F.interpolate(x, scale_factor=factor, mode=mode)
    torch.testing.assert_close(made.detach().full_tensor(), expected)
    rng = random.Random(1)
    agrees(lambda x: F.interpolate(x, scale_factor=factor, mode=mode), [x], [], grid, rng, [None])


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_antialiasing_reads_the_rows_that_others_send(mode: str) -> None:
    rng = random.Random(8)
    for rows, to in ((25, 14), (13, 8), (14, 11), (16, 10), (3, 7)):
        x = random_tensor(rng, (1, 2, rows, 4))

        def function(x, to=to):
            return F.interpolate(x, (to, 3), mode=mode, antialias=True)

        agrees(function, [x], [], random_grid(rng, ["height", "width"]), rng, [None])


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_an_antialiased_factor_that_keeps_the_size_is_serial_or_refused(mode: str) -> None:
    # Torch copies such a dimension, and differentiates as if it had resampled.
    rng, grid = random.Random(0), dc.ProcessGrid(height=-1)
    x = random_tensor(rng, (1, 2, 6, 4))

    def resized(x: Tensor, **options: Any) -> Tensor:
        return F.interpolate(x, mode=mode, antialias=True, **options)

    given = dc.distribute_tensor(x, grid)
    with pytest.raises(dc.UnsupportedOperation, match="torch copies the 6 rows that scale_factor="):
        resized(given, scale_factor=(1.1, 2.0))
    for options in (
        {"scale_factor": (2.0, 1.1)},
        {"scale_factor": (1.0, 1.5)},
        {"scale_factor": (1.1, 2.0), "recompute_scale_factor": True},
        {"size": (6, 8)},
    ):
        agrees(lambda x, o=options: resized(x, **o), [x], [], grid, rng, [given.grid_layout])


@pytest.mark.parallel([2])
def test_bicubic_factors_that_keep_both_sizes_are_refused() -> None:
    # Torch resamples such a plane, and copies the gradient as if it had copied the plane.
    rng, grid = random.Random(0), dc.ProcessGrid(height=-1)
    x = random_tensor(rng, (1, 2, 8, 8))
    with pytest.raises(dc.UnsupportedOperation, match="copies its gradient"):
        F.interpolate(dc.distribute_tensor(x, grid), scale_factor=1.05, mode="bicubic")
    for options in ({"scale_factor": (1.05, 1.5)}, {"size": (8, 8)}, {"scale_factor": 1.0}):
        agrees(lambda x, o=options: F.interpolate(x, mode="bicubic", **o), [x], [], grid, rng,
               [None])  # fmt: skip


@pytest.mark.parallel([2, 4])
def test_one_column_of_an_antialiased_plane_is_refused_and_of_a_block_is_not() -> None:
    rng = random.Random(9)
    grid = dc.ProcessGrid(width=-1)
    x = random_tensor(rng, (1, 2, 9, 7))
    for to in ((6, grid.size), (1, 1), (9, 1)):
        agrees(lambda x, to=to: F.interpolate(x, to, mode="bilinear", antialias=True), [x], [],
               grid, rng, [None])  # fmt: skip
    # A block of one channel has another memory format than the whole, on which torch depends.
    for layout in (None, dc.Layout(channel="width")):
        refused(lambda x: F.interpolate(x, (6, 1), mode="bilinear", antialias=True), [x], [], grid,
                rng, [layout])  # fmt: skip
    agrees(lambda x: F.interpolate(x.mT, (1, 6), mode="bilinear", antialias=True).mT, [x], [],
           grid, rng, [None])  # fmt: skip


@pytest.mark.parallel(2)
def test_weighted_rows_keep_the_memory_format() -> None:
    x = torch.randn(1, 3, 8, 6).to(memory_format=torch.channels_last)
    y = dc.distribute_tensor(x, dc.ProcessGrid(height=-1)).requires_grad_()
    made = F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=True)
    made.square().sum().backward()
    for block in (made.shard, y.grad.shard):
        assert block.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("mode", "antialias"),
    [
        *((m, False) for m in ("nearest", "linear", "bilinear", "bicubic")),
        *((m, True) for m in ("bilinear", "bicubic")),
    ],
)
def test_outputs_of_a_window_alone_are_those_of_the_whole(mode: str, antialias: bool) -> None:
    rng = random.Random(7)
    plane = mode in ("bilinear", "bicubic")
    kernel = upsampling(mode, antialias, 2 if plane else 1)
    alone = 0
    for _ in range(300):
        size, scale = rng.randrange(1, 200), rng.randrange(1, 9) / rng.randrange(1, 9)
        outputs = int(size * scale)
        r = Resampled(outputs, scale, _MODES.get(mode, mode), False, antialias)
        if outputs == 0 or r.ambiguous(size):
            continue
        start = rng.randrange(outputs)
        stop = rng.randrange(start, outputs) + 1
        found = r.alone(size, start, stop)
        if found is None:
            continue
        alone += 1
        before, factor = found
        ((first, last),) = r.intervals(size, start, stop)
        rest = [2] if plane else []
        x = torch.randn(1, 1, size, *rest, dtype=torch.float64)
        corners = () if mode == "nearest" else (False,)
        sizes, scales = [outputs, *rest], [scale, *(1.0 for _ in rest)]
        whole = kernel(x, sizes, *corners, *scales)
        sizes[0], scales[0] = before + stop - start, factor
        block = kernel(x[:, :, first:last].contiguous(), sizes, *corners, *scales)
        torch.testing.assert_close(
            block[:, :, before:], whole[:, :, start:stop], rtol=0, atol=1e-11
        )
    assert alone > 200
