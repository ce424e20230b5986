"""Random numbers depend on the seed and on the position in the global tensor, not on the grid."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import distconv as dc


@pytest.mark.parallel([1, 4])
def test_the_numbers_are_distributed_as_they_should_be() -> None:
    torch.manual_seed(0)
    grid = dc.ProcessGrid(height=-1)
    x = dc.distribute_tensor(torch.zeros(4, 8, 64, 64), grid)
    uniform, normal = torch.rand_like(x).full_tensor(), torch.randn_like(x).full_tensor()
    n = uniform.numel()
    assert abs(uniform.mean() - 0.5) < 4 * (1 / 12 / n) ** 0.5
    assert 0 <= uniform.min() < 1e-3 and 1 - 1e-3 < uniform.max() < 1
    assert abs(normal.mean()) < 4 / n**0.5 and abs(normal.var() - 1) < 4 * (2 / n) ** 0.5
    flat = normal.flatten()
    for lag in (1, 64, 64 * 64):
        assert abs((flat[lag:] * flat[:-lag]).mean()) < 4 / n**0.5
    assert len(torch.unique(torch.rand_like(x.double()).full_tensor())) == n


@pytest.mark.parallel([1, 4])
def test_dropout_scales_what_it_keeps_and_its_gradient() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = dc.distribute_tensor(torch.ones(2, 4, 9, 8), grid).requires_grad_()
    y = torch.nn.Dropout(0.25)(x)
    y.sum().backward()
    kept = y.detach().full_tensor()
    assert kept.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert torch.equal(x.grad.full_tensor(), kept)
    assert torch.nn.Dropout(0.25).eval()(x) is x
    planes = F.dropout3d(dc.distribute_tensor(torch.ones(4, 8, 3, 2, 2), grid), 0.5).full_tensor()
    assert set(planes.flatten(2).var(2).unique().tolist()) == {0.0}


@pytest.mark.parallel([2])
def test_a_probability_out_of_range_is_an_error() -> None:
    x = dc.distribute_tensor(torch.ones(2, 4), dc.ProcessGrid(sample=2))
    with pytest.raises(ValueError, match="p=1.5 is not a probability"):
        torch.nn.functional.dropout(x, 1.5)
    with pytest.raises(dc.UnsupportedOperation, match="generator"):
        x.clone().normal_(generator=torch.Generator())
