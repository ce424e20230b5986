"""A warp moves the boxes that the ranks sample, forward and backward, and holds no more."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor

import distconv as dc
from benchmarks.measuring.memory import peak_of
from tests.ops.warp.test_warp_properties import identity
from tests.support.arriving import arriving
from tests.support.serial import agrees, random_tensor


def _moved(
    grid: dc.ProcessGrid, x: Tensor, points: Tensor, **options: object
) -> tuple[float, float, float]:
    """Return the bytes at the busiest rank over those of `x`: forward, backward, and ledger."""
    image = dc.distribute_tensor(x, grid).requires_grad_()
    field = dc.distribute_tensor(points, grid, dc.Layout.of((*_space(image), ()))).requires_grad_()
    dc.redistributions(reset=True)
    with arriving(grid) as forward:
        y = F.grid_sample(image, field, **options)
    told = sum(entry.bytes for entry in dc.redistributions())
    with arriving(grid) as backward:
        y.sum().backward()
    own = [n / (x.numel() * x.element_size()) for n in (sum(forward), sum(backward), told)]
    everywhere = MPI.COMM_WORLD.allgather(own)
    return tuple(max(row) for row in zip(*everywhere, strict=True))  # type: ignore[return-value]


def _space(x: dc.DistTensor) -> list[tuple[str, ...]]:
    cuts = x.grid_layout.cuts(x.dim())
    return [cuts[0], *cuts[2:]]


@pytest.mark.parallel([2, 4])
def test_a_warp_by_a_voxel_moves_the_neighbouring_planes() -> None:
    n, plane = MPI.COMM_WORLD.size, (64, 32, 32)
    grid = dc.ProcessGrid(depth=-1)
    away = 2 * torch.rand(1, *plane, 3, generator=torch.Generator().manual_seed(1)) - 1
    points = identity(plane, True, torch.float32) + away * 2 / (torch.tensor(plane[::-1]) - 1)
    forward, backward, told = _moved(grid, torch.ones(1, 2, *plane), points, align_corners=True)
    sides = min(n - 1, 2)
    assert told == sides / 64
    assert [forward, backward] == pytest.approx([told, told], abs=0.001)


@pytest.mark.parallel([4])
@pytest.mark.parametrize("shift", [0.5, 4.0])
def test_points_far_away_move_their_box_and_no_others(shift: float) -> None:
    grid = dc.ProcessGrid(height=2, width=2)
    points = identity((64, 64), False, torch.float32) + shift
    forward, _, told = _moved(grid, torch.ones(1, 32, 64, 64), points, align_corners=False)
    # A shift by a quarter of the plane moves three quarters of a block, at most; or three pixels.
    expected = 3 / 16 + 0.04 if shift < 1 else 0.01
    assert told <= expected and forward < told + 0.01


@pytest.mark.parallel([4])
def test_small_planes_are_gathered() -> None:
    grid = dc.ProcessGrid(height=2, width=2)
    points = identity((8, 8), False, torch.float32)
    forward, backward, told = _moved(grid, torch.ones(1, 2, 8, 8), points, align_corners=False)
    assert forward == told == 0.75 and backward == pytest.approx(0.75, abs=0.05)


def _step(serial: bool) -> Callable[[], object]:
    """Return a step that integrates a velocity field by scaling and squaring, and its gradients."""
    plane = (48, 32, 32)
    velocity, points = torch.ones(1, 3, *plane) / 32, identity(plane, True, torch.float32)
    if not serial:
        grid = dc.ProcessGrid(depth=-1)
        velocity = dc.distribute_tensor(velocity, grid)
        points = dc.distribute_tensor(points, grid, dc.Layout(channel="depth"))
    velocity.requires_grad_()

    def step() -> None:
        velocity.grad = None
        flow = velocity / 4
        for _ in range(2):
            moved = points + flow.permute(0, 2, 3, 4, 1)
            flow = flow + F.grid_sample(flow, moved, padding_mode="border", align_corners=True)
        flow.sum().backward()

    return step


@pytest.mark.parallel([2, 4])
def test_a_rank_needs_its_share_of_the_serial_memory() -> None:
    serial = peak_of(partial(_step, serial=True)).whole
    own = peak_of(partial(_step, serial=False)).whole
    most = max(MPI.COMM_WORLD.allgather(own))
    assert most / serial < 1.6 / MPI.COMM_WORLD.size, most / serial


def _lookups(left: Tensor, right: Tensor) -> Tensor:
    """Return correlations of positions with those one pixel to the right, as RAFT looks them up.

    It looks them up in planes of several resolutions.
    """
    n, c, h, w = left.shape
    pairs = (left.flatten(2).mT @ right.flatten(2)).view(n, h, w, 1, h, w).reshape(-1, 1, h, w)
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    here = torch.stack([columns + 1, rows], -1).to(left.dtype)[None] + 0 * left[:, :2].movedim(1, 3)
    points = 2 * here.reshape(-1, 1, 1, 2) / torch.tensor([w - 1.0, h - 1.0]).to(left.dtype) - 1
    levels = [
        F.grid_sample(x, points, align_corners=True).view(n, h, w, -1)
        for x in (pairs, F.avg_pool2d(pairs, 2), F.max_pool2d(pairs, 3, 1, padding=1))
    ]
    return torch.cat(levels, -1).permute(0, 3, 1, 2)


@pytest.mark.parallel([2, 3, 4])
def test_planes_of_merged_samples_are_sampled_where_they_lie() -> None:
    grid = (
        dc.ProcessGrid(height=2, width=-1)
        if MPI.COMM_WORLD.size == 4
        else dc.ProcessGrid(height=-1)
    )
    x = random_tensor(random.Random(0), (1, 4, 9, 6))
    agrees(_lookups, [x, x + 1], [], grid, random.Random(1), [None] * 2)
    left, right = (dc.distribute_tensor(x, grid) for _ in range(2))
    with dc.count_traffic() as traffic:
        y = _lookups(left, right)
    assert y.grid_layout == left.grid_layout
    names = "grid_sample", "pool2d", "cat"
    assert not any(name in entry.operator for entry in traffic.entries for name in names)
