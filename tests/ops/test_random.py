"""Random numbers depend on the seed and on the position in the global tensor, not on the grid."""

from __future__ import annotations

from collections.abc import Callable

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


@pytest.mark.parallel([1, 4])
@pytest.mark.parametrize(
    ("function", "ndim", "planes"),
    [
        (F.dropout1d, 2, 1),
        (F.dropout1d, 3, 2),
        (F.dropout2d, 3, 2),
        (F.dropout2d, 4, 2),
        (F.dropout3d, 4, 1),
        (F.dropout3d, 5, 2),
    ],
)
@pytest.mark.filterwarnings("ignore:dropout2d")
def test_whole_planes_are_dropped_where_torch_drops_them(
    function: Callable[..., torch.Tensor], ndim: int, planes: int
) -> None:
    ones = torch.ones(8, 6, *(4,) * (ndim - 2))
    x = dc.distribute_tensor(ones, dc.ProcessGrid(sample=-1))
    for dropped in (function(x, 0.5).full_tensor(), function(ones, 0.5)):
        each = dropped.reshape(*ones.shape[:planes], -1)
        assert set(each.unique().tolist()) == {0.0, 2.0} and not each.var(-1).any()
        assert each.flatten(0, -2).mean(-1).var() > 0


@pytest.mark.parallel([1, 2])
@pytest.mark.filterwarnings("ignore:dropout2d")
def test_inputs_without_planes_are_refused_as_by_torch() -> None:
    grid = dc.ProcessGrid(sample=-1)
    for training in (True, False):
        with pytest.raises(RuntimeError, match="Expected 2D or 3D input"):
            F.dropout1d(dc.distribute_tensor(torch.ones(2, 4, 2, 2), grid), 0.5, training)
    with pytest.raises(RuntimeError, match="at least 2 dimensions"):
        F.dropout2d(dc.DistTensor.from_local(torch.ones(2), grid, dc.Layout()))


@pytest.mark.parallel([2])
def test_a_probability_out_of_range_is_an_error() -> None:
    x = dc.distribute_tensor(torch.ones(2, 4), dc.ProcessGrid(sample=2))
    with pytest.raises(ValueError, match="between 0 and 1, but got 1.5"):
        torch.nn.functional.dropout(x, 1.5)
    with pytest.raises(dc.UnsupportedOperation, match="generator"):
        x.clone().normal_(generator=torch.Generator())
