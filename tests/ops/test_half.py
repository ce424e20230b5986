"""Half types overflow only where serial half types do."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import distconv as dc

FUNCTIONS = {
    "mse_loss": lambda x: F.mse_loss(x, x + 2),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x * 0, x * 0),
    "cross_entropy": lambda x: F.cross_entropy(x * 0, x[:, 0].long() * 0),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 32, 8),
    "var": lambda x: (x - 99).var(),
    "mean": lambda x: x.mean(),
    "group_norm": lambda x: F.group_norm(x, 1),
    "interpolate": lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"),
}


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_many_elements_are_added_up_in_single_precision(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (100 + torch.randn(1, 4, 200, 40, generator=generator)).to(dtype)
    expected = FUNCTIONS[name](x.float())
    y = FUNCTIONS[name](dc.distribute_tensor(x, dc.ProcessGrid(height=-1)))
    assert y.dtype == dtype
    error = (y.full_tensor().float() - expected).abs().max()
    scale = max(expected.abs().max().item(), 1.0)
    assert error <= 64 * torch.finfo(dtype).eps * scale


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_batch_norm_in_half_precision_throughout_trains(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (100 + torch.randn(2, 3, 12, 5, generator=generator)).to(dtype)
    dy = torch.randn(2, 3, 12, 5, generator=generator).to(dtype)
    exact = torch.nn.BatchNorm2d(3)
    torch.nn.init.normal_(exact.weight, generator=generator)
    norm = copy.deepcopy(exact).to(dtype)
    exact.load_state_dict(norm.state_dict())
    leaf = x.float().requires_grad_()
    expected = exact(leaf)
    expected.backward(dy.float())
    grid = dc.ProcessGrid(height=-1)
    d = dc.distribute_tensor(x, grid).requires_grad_()
    y = dc.parallelize(norm, grid)(d)
    y.backward(dy)
    assert (y.dtype, d.grad.dtype, norm.weight.grad.dtype) == (dtype,) * 3
    for got, wanted in ((y.detach(), expected.detach()), (d.grad, leaf.grad)):
        error = (got.full_tensor().float() - wanted).abs().max()
        assert error <= 16 * torch.finfo(dtype).eps * wanted.abs().max()
