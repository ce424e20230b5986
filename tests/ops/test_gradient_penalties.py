"""Gradient penalties, as of a critic, equal the serial ones where some ranks have no elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import distconv as dc
from tests.support.verdicts import raise_together

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolution": (lambda: nn.Conv2d(3, 4, 3, padding=1), (2, 3, 2, 2)),
    "convolution with a stride": (lambda: nn.Conv2d(3, 2, 3, 2, 1), (2, 3, 3, 2)),
    "convolution in groups": (lambda: nn.Conv2d(2, 2, 3, padding=1, groups=2), (2, 2, 2, 2)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(3, 2, 2, 2), (2, 3, 2, 1)),
    "max pooling": (lambda: nn.MaxPool2d(2), (2, 3, 4, 4)),
    "mean pooling": (lambda: nn.AdaptiveAvgPool2d(1), (2, 3, 2, 2)),
    "batch norm": (lambda: nn.BatchNorm2d(3), (2, 3, 2, 2)),
    "group norm": (lambda: nn.GroupNorm(1, 2), (2, 2, 2, 2)),
    "instance norm": (lambda: nn.InstanceNorm2d(2, affine=True), (2, 2, 2, 2)),
    "layer norm": (lambda: nn.LayerNorm(2), (2, 3, 2, 2)),
    "linear": (lambda: nn.Linear(2, 2), (2, 3, 2, 2)),
    "critic": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 2, 3, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(4, 1)
        ),
        (2, 2, 4, 2),
    ),
}

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "of a sum": lambda y: y.sum(),
    "of squares": lambda y: (y**2).sum(),
}


def penalised(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return a penalty, and its gradients by parameters; zeros in place of None."""
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(loss(model(x)), x, create_graph=True)
    # Smooth, as some of the gradients are zero but for rounding.
    penalty = ((g.flatten(1).square().sum(1) - 1) ** 2).mean()
    if penalty.requires_grad:
        penalty.backward()
    return [
        penalty,
        *(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()),
    ]


@pytest.mark.parallel([3, 4])
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("axis", ["sample", "channel", "height", "width"])
@pytest.mark.parametrize("name", LAYERS)
def test_penalties_equal_serial_where_blocks_are_empty(
    name: str, axis: str, debug: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, shape = LAYERS[name]
    grid = dc.ProcessGrid(**{axis: -1})
    monkeypatch.setattr(grid.journal, "debug", debug)
    for loss in LOSSES.values():
        torch.manual_seed(0)
        serial = make().double()
        torch.manual_seed(0)
        model = dc.parallelize(make().double(), grid)
        x = torch.randn(shape, dtype=torch.float64)
        expected = penalised(serial, x, loss)
        found = penalised(model, dc.distribute_tensor(x, grid), loss)
        wrong = []
        for i, (own, wanted) in enumerate(zip(found, expected, strict=True)):
            whole = own.full_tensor() if isinstance(own, dc.DistTensor) else own
            if (whole - wanted).abs().max() > 1e-8 * (1 + wanted.abs().max()):
                wrong.append(f"{i}: {whole} in place of {wanted}")
        raise_together(wrong)
