"""Mini-batches of fewer samples than the grid cuts them into; see also model/test_networks."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from distconv.layers import BatchNorm2d
from tests.support.serial import agrees, deviation, random_tensor


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("statistics", ["sample", "local"])
def test_ranks_without_samples_have_no_part_in_running_statistics(statistics: str) -> None:
    grid = dc.ProcessGrid(sample=-1)
    serial = nn.BatchNorm2d(3).double()
    model = dc.parallelize(BatchNorm2d(3, statistics=statistics).double(), grid)
    x = random_tensor(random.Random(0), (1, 3, 4, 5))
    cut = dc.distribute_tensor(x, grid).requires_grad_()
    y, wanted = model(cut), serial(x.requires_grad_())
    assert deviation(y.detach().full_tensor(), wanted.detach()) <= 1e-12
    (y.square() + y).exp().mean().backward()
    (wanted.square() + wanted).exp().mean().backward()
    for name, value in serial.state_dict().items():
        assert deviation(model.state_dict()[name], value) <= 1e-12, name
    for p, q in zip(model.parameters(), serial.parameters(), strict=True):
        assert deviation(p.grad, q.grad) <= 1e-12
    assert deviation(cut.grad.full_tensor(), x.grad) <= 1e-12


@pytest.mark.parallel([2, 4])
def test_one_sample_without_a_plane_has_no_statistics_anywhere() -> None:
    grid = dc.ProcessGrid(sample=-1)
    x = dc.distribute_tensor(torch.ones(1, 3), grid)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        F.batch_norm(x, None, None, training=True)


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("method", ["assembled", "overlapped"])
def test_planes_of_few_samples_are_pooled_and_convolved(kernel: int, method: str) -> None:
    rng = random.Random(kernel)
    grid = dc.ProcessGrid(sample=-1)
    x, w = random_tensor(rng, (grid.size - 1, 2, 7, 6)), random_tensor(rng, (4, 2, kernel, kernel))
    with dc.method(method):
        agrees(
            lambda x, w: F.max_pool2d(F.conv2d(x, w, padding=kernel // 2), kernel, 2, kernel // 2),
            [x],
            [w],
            grid,
            rng,
            [dc.Layout(sample="sample")],
        )
