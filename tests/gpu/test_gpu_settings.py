"""cuDNN is reached through torch, whose settings count for distributed tensors too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import distconv as dc
from tests.gpu.steps import RANKS, batch, net
from tests.support.serial import deviation

pytestmark = pytest.mark.gpu


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("method", ["overlapped", "assembled"])
def test_float32_is_rounded_as_torch_is_told_to(
    grid: dc.ProcessGrid, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 64, 40, 40, generator=generator)
    weight = torch.randn(64, 64, 3, 3, generator=generator)
    exact = F.conv2d(x.double(), weight.double(), padding=1)
    for allowed in (False, True):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
        plain = F.conv2d(x.to(grid.device), weight.to(grid.device), padding=1)
        with dc.method(method):
            cut = F.conv2d(dc.distribute_tensor(x, grid), weight.to(grid.device), padding=1)
        # Ten binary places, or twenty-three.
        coarse = [deviation(y.double().cpu(), exact) > 1e-5 for y in (plain, cut.full_tensor())]
        assert coarse[0] == coarse[1]
        assert allowed or not coarse[0]


@pytest.mark.parallel(RANKS)
def test_deterministic_steps_have_the_same_bits(
    grid: dc.ProcessGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    # What follows max pooling in backward passes is left to atomics, as in serial torch.
    model = dc.parallelize(torch.nn.Sequential(*net()[:3], torch.nn.Conv2d(8, 8, 5, 2, 2)), grid)
    x = dc.distribute_tensor(batch(torch.float32)[0], grid)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    first, second = gradients(), gradients()
    assert len(first) == len(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parallel(RANKS)
def test_benchmarked_algorithms_compute_the_same(
    grid: dc.ProcessGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    x, weight = batch()[0], torch.randn(5, 3, 3, 3, dtype=torch.float64)
    grid.comm.Bcast(weight.numpy())
    y = F.conv2d(dc.distribute_tensor(x, grid), weight.to(grid.device), padding=1)
    assert deviation(y.full_tensor().cpu(), F.conv2d(x, weight, padding=1)) < 1e-12
