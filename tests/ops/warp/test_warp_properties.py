"""Warps equal serial torch's, forward and backward, wherever the points lie."""

from __future__ import annotations

import random
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor

import distconv as dc
from distconv.comm.ledger import trace_movements
from distconv.device.kinds import thresholds
from distconv.ops.warp import grid_sample
from distconv.planning.dry_run import DryRunGrid
from tests.support.serial import agrees, random_tensor
from tests.support.strategies import Case, on_any_grid, sizes

MODES = ("bilinear", "nearest", "bicubic")
PADDINGS = ("zeros", "border", "reflection")


@pytest.fixture(autouse=True)
def no_plane_is_small() -> Iterator[None]:
    """Let boxes move in all tests, however small the planes are."""

    def none_gathered(accelerator: bool) -> object:
        return thresholds(accelerator)._replace(gathered_plane=0)

    with mock.patch.object(grid_sample, "thresholds", none_gathered):
        yield


def identity(shape: tuple[int, ...], corners: bool, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the points of a plane's own pixels, (1, *plane, coordinates)."""
    along = [torch.linspace(-1, 1, n, dtype=dtype) * (1 if corners else (n - 1) / n) for n in shape]
    return torch.stack(torch.meshgrid(*along, indexing="ij")[::-1], -1)[None]


@on_any_grid(60, more=[3, 6])
def test_sampling_anywhere_equals_serial(case: Case) -> None:
    n = case.one_of(2, 3)
    mode = case.one_of(*MODES) if n == 2 else case.one_of(*MODES[:2])
    options = mode, case.one_of(*PADDINGS), case.flag()
    plane = case.plane(n)
    outputs = case.one_of(plane[2:], [case.draw(sizes(1, 7)) for _ in range(n)])
    x = case.tensor(plane)
    points = case.tensor([plane[0], *outputs, n]) * case.one_of(0.4, 1.0, 3.0, 30.0)
    if outputs == plane[2:] and case.flag():
        # Points near their own pixel, and none beside an edge, where the slope is a toss.
        points = identity(tuple(outputs), options[2]) + 0.013 * points
    cut = case.one_of([0, 1], [0], [1])
    case.agrees(lambda x, points: F.grid_sample(x, points, *options), x, points, cut=cut)


@on_any_grid(30, more=[3])
def test_points_that_are_not_finite_equal_serial(case: Case) -> None:
    n = case.one_of(2, 3)
    mode = case.one_of(*MODES) if n == 2 else case.one_of(*MODES[:2])
    options = mode, case.one_of(*PADDINGS), case.flag()
    plane = case.plane(n)
    points = case.tensor([plane[0], *plane[2:], n], "nan", "wild", "infinite")
    if case.flag():
        points = points.nan_to_num(1e30, 1e20, -1e25)
    # Torch's own kernels end the process in the backward pass, but for zeros.
    frozen = [] if options[1] == "zeros" else [0]
    case.agrees(
        lambda x: F.grid_sample(x, points, *options), case.tensor(plane), cut=[0], frozen=frozen
    )


@on_any_grid(20, more=[3])
def test_affine_warps_equal_serial(case: Case) -> None:
    n = case.one_of(2, 3)
    plane, corners = case.plane(n), case.flag()
    theta = case.tensor([plane[0], n, n + 1])

    def warp(x: Tensor, theta: Tensor) -> Tensor:
        points = F.affine_grid(theta, plane, corners)
        return F.grid_sample(x, points, padding_mode="border", align_corners=corners)

    case.agrees(warp, case.tensor(plane), theta, cut=case.one_of([0, 1], [1]))


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("n", [2, 3])
def test_slopes_at_integer_pixels_are_the_serial_ones(
    n: int, corners: bool, dtype: torch.dtype
) -> None:
    """The slope jumps at integers, so it shows which two pixels were taken, to the last bit."""
    grid = dc.ProcessGrid(height=-1)
    rng = random.Random(1)
    plane = (41, 29) if n == 2 else (19, 11, 13)
    layout = dc.Layout(height="height")
    points = identity(plane, corners, dtype)
    x = random_tensor(rng, (1, 2, *plane), dtype)
    agrees(
        lambda x, flow: F.grid_sample(x, points + flow, "bilinear", "border", corners),
        [x, torch.zeros_like(points)],
        [],
        grid,
        rng,
        [layout, dc.Layout.of(((), *layout.cuts(n + 2)[2:], ()))],
        1e-10 if dtype == torch.float64 else 1e-4,
    )


@pytest.mark.parallel([2, 3])
def test_points_between_two_pixels_take_the_even_one() -> None:
    grid, rng = dc.ProcessGrid(height=-1), random.Random(1)
    x, points = random_tensor(rng, (1, 1, 17, 5)), identity((17, 5), True)
    points = points[:, 1:-1] + 1 / torch.tensor([4.0, 16.0])
    assert torch.equal(8 * (points[..., 1] + 1) % 1, torch.full((1, 15, 5), 0.5).double())
    layout = dc.Layout(height="height")
    agrees(
        lambda x: F.grid_sample(x, points, "nearest", align_corners=True),
        [x],
        [],
        grid,
        rng,
        [layout],
    )


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding", PADDINGS)
def test_half_types_are_sampled_at_the_serial_pixels(
    padding: str, mode: str, n: int, dtype: torch.dtype
) -> None:
    """In half types positions are rounded to large parts of a pixel, and to the same in a box."""
    if (n, mode) == (3, "bicubic"):
        return  # which torch does not have
    grid, rng = dc.ProcessGrid(height=-1), random.Random(1)
    plane = (150, 29) if n == 2 else (11, 150, 13)
    for corners in (False, True):
        x = random_tensor(rng, (1, 2, *plane), dtype)
        field = identity(plane, corners) + 0.04 * random_tensor(rng, (1, *plane, n))
        layout = dc.distribute_tensor(x, grid).grid_layout
        points = dc.Layout.of(((), *layout.cuts(n + 2)[2:], ()))
        dc.redistributions(reset=True)
        agrees(
            lambda x, points, c=corners: F.grid_sample(x, points, mode, padding, c),
            [x, field.to(dtype)],
            [],
            grid,
            rng,
            [layout, points],
            8 * torch.finfo(dtype).eps,
        )
        whole = 1 - 1 / grid.size if padding == "reflection" else 0.4
        moved = sum(e.bytes for e in dc.redistributions() if e.operator == "grid_sample")
        assert moved <= x.nbytes * whole


@pytest.mark.parallel([2])
def test_points_of_a_whole_plane_keep_their_partition() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = dc.distribute_tensor(torch.ones(1, 2, 4, 6), grid, dc.Layout())
    points = dc.distribute_tensor(torch.zeros(1, 8, 3, 2), grid, dc.Layout(channel="height"))
    dc.redistributions(reset=True)
    y = F.grid_sample(x, points, align_corners=False)
    assert y.grid_layout == dc.Layout(height="height") and not dc.redistributions()
    assert y.shard.shape == (1, 2, 8 // MPI.COMM_WORLD.size, 3)


@pytest.mark.parallel([2])
@pytest.mark.filterwarnings("error:compile")
def test_a_compiled_program_is_replayed_with_other_points_and_positions() -> None:
    grid = dc.ProcessGrid(height=-1)
    rng = random.Random(2)
    x, table = random_tensor(rng, (1, 2, 9, 7)), random_tensor(rng, (11, 3))

    def program(x: Tensor, points: Tensor, table: Tensor, index: Tensor) -> Tensor:
        return F.grid_sample(x, points, align_corners=False).sum() + table[index].cos().sum()

    compiled = dc.compile(program)
    image = dc.distribute_tensor(x, grid)
    rows = dc.distribute_tensor(table, grid, dc.Layout(sample="height"))
    for shift in range(6):
        points, index = random_tensor(rng, (1, 4, 4, 2)), (torch.arange(8) + shift) % 11
        found = compiled(image, points, rows, index)
        expected = program(x, points, table, index)
        assert abs(float(found) - float(expected)) < 1e-10


def test_a_dry_run_gathers_the_plane() -> None:
    grid = DryRunGrid({"height": 4})
    image, field = grid.tensor((1, 2, 64, 64)), torch.empty(1, 64, 64, 2, device="meta")
    with trace_movements() as movements:
        assert F.grid_sample(image, field, align_corners=False).shape == (1, 2, 64, 64)
    assert sum(m.bytes for m in movements) == 4 * 2 * 64 * 64 * 3 / 4
