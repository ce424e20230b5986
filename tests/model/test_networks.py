"""Whole networks, unmodified torch.nn modules, train on any cut as they train serially.

Some mini-batches have fewer samples than the grid cuts them into, as the last of an epoch may.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

import distconv as dc
from tests.support.published import NETWORKS, some_of
from tests.support.serial import deviation, noted, random_tensor, same_state

GRIDS = {
    1: [{}],
    2: [{"height": 2}, {"sample": 2}, {"channel": 2}],
    4: [
        {"sample": 2, "height": 2},
        {"height": 2, "width": 2},
        {"channel": 2, "width": 2},
        {"channel": 2, "filter": 2},
        {"sample": 2, "channel": 2},
    ],
}


TRAINED = ["ResNet", "U-Net 2-D, batch norm", "V-Net", "DenseNet", "CosmoFlow, maximum", "DeepLab"]


def loss_of(y: Tensor) -> Tensor:
    target = torch.arange(y[:, 0].numel()).view(y[:, 0].shape) % y.shape[1]
    return F.cross_entropy(y, target, label_smoothing=0.1) + y.square().mean()


def figures(y: Tensor) -> list[float]:
    """Return the figures that a program reports of a mini-batch's result."""
    y = y.detach()
    right = y.argmax(1) == 1
    shares = right.sum(), right.double().mean(), y.softmax(1)[:, 1].amax()
    rest = y.max(), y.var(), y.flatten(1).std(1).mean(), y.logsumexp((0, 1)).sum()
    return [figure.item() for figure in (*shares, *rest)]


def train(model: nn.Module, batches: list[Tensor]) -> list[float]:
    """Take a step of SGD with momentum for each mini-batch; return the losses and figures."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    seen = []
    for x in batches:
        optimizer.zero_grad()
        y = model(x)
        value = loss_of(y)
        value.backward()
        optimizer.step()
        seen += [value.item(), *figures(y)]
    return seen


@pytest.mark.parallel(list(GRIDS))
@pytest.mark.parametrize("name", TRAINED)
def test_training_steps_give_the_serial_parameters(name: str) -> None:
    make, sample = NETWORKS[name]
    for axes in some_of(GRIDS[MPI.COMM_WORLD.size], TRAINED.index(name)):
        rng = random.Random(0)
        torch.manual_seed(0)
        serial = make().double()
        serial(random_tensor(rng, (2, *sample)))  # gives lazy layers their shape
        model = copy.deepcopy(serial)
        grid = dc.ProcessGrid(**axes)
        dc.parallelize(model, grid, shard_parameters="sample" in axes and "channel" in axes)
        batches = [random_tensor(rng, (n, *sample)).requires_grad_() for n in (4, 1, 3)]
        with noted(grid):
            expected = train(serial, batches)
            cut = [dc.distribute_tensor(x.detach(), grid).requires_grad_() for x in batches]
            assert train(model, cut) == pytest.approx(expected, rel=1e-9)
            for got, wanted in zip(cut, batches, strict=True):
                assert deviation(got.grad.full_tensor(), wanted.grad) <= 1e-9
            same_state(model, serial, 1e-9)
            x = batches[0]
            y = model.eval()(dc.distribute_tensor(x.detach(), grid)).full_tensor()
            assert deviation(y.detach(), serial.eval()(x).detach()) <= 1e-9
