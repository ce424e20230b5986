"""Published networks, unmodified, compute and train like serial on any cut, at odd sizes."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.support.published import NETWORKS
from tests.support.serial import TOLERANCE, deviation, random_tensor

GRIDS = {
    1: [{}],
    2: [{"height": 2}, {"channel": 2}],
    3: [{"height": 3}, {"channel": 3}],
    4: [
        {"height": 4},
        {"height": 2, "width": 2},
        {"width": 4},
        {"sample": 2, "height": 2},
        {"channel": 2, "filter": 2},
        {"channel": 2, "height": 2},
    ],
    8: [{"sample": 2, "height": 2, "width": 2}, {"channel": 2, "filter": 2, "width": 2}],
}


@pytest.mark.parallel(list(GRIDS))
@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_and_all_gradients_are_the_serial_ones(name: str, request) -> None:
    rng = random.Random(name)
    make, sample = NETWORKS[name]
    torch.manual_seed(0)
    serial = make().double()
    x = random_tensor(rng, (2, *sample))
    serial(x)  # gives lazy layers their shape
    reference = copy.deepcopy(serial)
    whole = x.clone().requires_grad_()
    expected = reference(whole)
    target = expected.detach().argmax(1).roll(1, 0)
    F.cross_entropy(expected, target).backward()
    largest = max(p.grad.abs().max().item() for p in reference.parameters())
    for extents in GRIDS[request.node.callspec.params["_nprocs"]]:
        grid = dc.ProcessGrid(**extents)
        model = dc.parallelize(copy.deepcopy(serial), grid)
        cut = dc.distribute_tensor(x, grid).requires_grad_()
        actual = model(cut)
        assert deviation(actual.detach().full_tensor(), expected.detach()) <= TOLERANCE
        F.cross_entropy(actual, target).backward()
        for (key, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            difference = (p.grad - q.grad).abs().max().item()
            # A bias before a norm has a gradient of zero but for rounding.
            assert difference <= TOLERANCE * max(q.grad.abs().max().item(), 1e-3 * largest), key
        assert deviation(cut.grad.full_tensor(), whole.grad) <= TOLERANCE
        for (key, b), c in zip(model.named_buffers(), reference.buffers(), strict=True):
            assert deviation(b, c) <= TOLERANCE, key
