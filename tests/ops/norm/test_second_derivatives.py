"""Gradients of normalisations cannot be differentiated: an error, never a gradient without them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import distconv as dc
from tests.support.serial import TOLERANCE, deviation, raised_everywhere

NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "instance_norm": F.instance_norm,
    "group_norm": lambda x: F.group_norm(x, 2),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
}


def gradient_of_norm(name: str, x: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of a norm's input, recorded, for an incoming one that is constant."""
    leaf = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(NORMS[name](leaf), leaf, dy, create_graph=True)
    return gradient


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_norms_are_not_differentiated_silently(name: str) -> None:
    grid = dc.ProcessGrid(height=-1)
    torch.manual_seed(0)
    x, dy = torch.randn(2, 2, 4, 6, 5, dtype=torch.float64).unbind()
    expected = gradient_of_norm(name, x, dy)
    made = gradient_of_norm(name, dc.distribute_tensor(x, grid), dc.distribute_tensor(dy, grid))
    assert deviation(made.detach().full_tensor(), expected.detach()) <= TOLERANCE
    message = raised_everywhere(dc.UnsupportedOperation, made.square().sum().backward)
    assert name in message and "second derivatives" in message


@pytest.mark.parallel([2, 3])
def test_gradients_of_extrema_that_are_constants_can_be_differentiated() -> None:
    grid = dc.ProcessGrid(height=-1)
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6, 5, dtype=torch.float64)
    gradients = []
    for leaf in (x.clone().requires_grad_(), dc.distribute_tensor(x, grid).requires_grad_()):
        (gradient,) = torch.autograd.grad(leaf.amax(2).sum(), leaf, create_graph=True)
        (leaf.square() * gradient).sum().backward()
        gradients.append(leaf.grad)
    expected, made = gradients
    assert deviation(made.full_tensor(), expected) <= TOLERANCE
