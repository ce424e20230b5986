"""Positions of maxima lead back to the plane: by halos, or gathered where they lie far away."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import distconv as dc

pytestmark = pytest.mark.gpu

POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
UNPOOLS = {1: F.max_unpool1d, 2: F.max_unpool2d, 3: F.max_unpool3d}


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_unpooling_what_was_pooled_moves_halos_only(n: int) -> None:
    grid = dc.ProcessGrid(width=-1)
    x = torch.randn(2, 3, *(12 + d for d in range(n)), dtype=torch.float64)
    d = dc.distribute_tensor(x, grid).requires_grad_()
    x.requires_grad_()
    dc.redistributions(reset=True)
    for y in (x, d):
        values, indices = POOLS[n](y, 3, stride=2, return_indices=True)
        made = UNPOOLS[n](values * 2, indices, 3, 2, output_size=x.shape[2:])
        made.pow(2).sum().backward()
    assert dc.redistributions() == []
    torch.testing.assert_close(d.grad.full_tensor(), x.grad, rtol=1e-13, atol=0)


@pytest.mark.parallel([2, 3])
def test_indices_far_from_their_windows_are_found() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = torch.arange(1.0, 17).reshape(1, 1, 4, 4)
    indices = torch.arange(64).flip(0)[::4].reshape(1, 1, 4, 4)
    made = F.max_unpool2d(dc.distribute_tensor(x, grid), indices, 2)
    torch.testing.assert_close(made.full_tensor(), F.max_unpool2d(x, indices, 2))
