"""Published networks, unmodified, compute and train like serial on any cut, at odd sizes."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import distconv as dc
from tests.support.everywhere import from_rank_zero
from tests.support.published import NETWORKS, some_of
from tests.support.serial import TOLERANCE, deviation, random_tensor

GRIDS = {
    1: [{}],
    2: [{"height": 2}, {"channel": 2}],
    4: [
        {"height": 2, "width": 2},
        {"sample": 2, "height": 2},
        {"channel": 2, "filter": 2},
        {"channel": 2, "height": 2},
    ],
}


def serial_step(
    model: nn.Module, x: Tensor
) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Return result, target, the gradients of the input and of the parameters, and the buffers."""
    x = x.clone().requires_grad_()
    result = model(x)
    target = result.detach().argmax(1).roll(1, 0)
    F.cross_entropy(result, target).backward()
    gradients = [p.grad for p in model.parameters()]
    return result.detach(), target, x.grad, gradients, [*model.buffers()]


@pytest.mark.parallel(list(GRIDS))
@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_and_all_gradients_are_the_serial_ones(name: str, request) -> None:
    rng = random.Random(name)
    make, sample = NETWORKS[name]
    torch.manual_seed(0)
    serial = make().double()
    x = random_tensor(rng, (2, *sample))
    serial(x)  # gives lazy layers their shape
    expected, target, input_gradient, gradients, buffers = from_rank_zero(
        lambda: serial_step(copy.deepcopy(serial), x)
    )
    largest = max(gradient.abs().max().item() for gradient in gradients)
    grids = GRIDS[request.node.callspec.params["_nprocs"]]
    for extents in some_of(grids, list(NETWORKS).index(name)):
        grid = dc.ProcessGrid(**extents)
        model = dc.parallelize(copy.deepcopy(serial), grid)
        cut = dc.distribute_tensor(x, grid).requires_grad_()
        actual = model(cut)
        assert deviation(actual.detach().full_tensor(), expected) <= TOLERANCE
        F.cross_entropy(actual, target).backward()
        for (key, p), gradient in zip(model.named_parameters(), gradients, strict=True):
            difference = (p.grad - gradient).abs().max().item()
            # A bias before a norm has a gradient of zero but for rounding.
            assert difference <= TOLERANCE * max(gradient.abs().max().item(), 1e-3 * largest), key
        assert deviation(cut.grad.full_tensor(), input_gradient) <= TOLERANCE
        for (key, b), c in zip(model.named_buffers(), buffers, strict=True):
            assert deviation(b, c) <= TOLERANCE, key
