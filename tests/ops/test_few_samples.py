"""Mini-batches of fewer samples than the grid cuts them into, such as the last of an epoch."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

import distconv as dc
from distconv.layers import BatchNorm2d
from tests.support.serial import agrees, deviation, noted, random_tensor

GRIDS = {
    2: [{"sample": 2}],
    3: [{"sample": 3}],
    4: [{"sample": 4}, {"sample": 2, "height": 2}, {"sample": 2, "channel": 2}],
}


class Classifier(nn.Module):
    """A network with every kind of layer of networks for planes."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(4, 6, 3, stride=2, groups=2),
            nn.GroupNorm(2, 6),
            nn.SiLU(),
            nn.ConvTranspose2d(6, 4, 3, stride=2),
            nn.AvgPool2d(2),
            nn.InstanceNorm2d(4, affine=True),
            nn.AdaptiveAvgPool2d((2, 2)),
        )
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(16, 8), nn.LayerNorm(8), nn.PReLU(), nn.Linear(8, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class Segmenter(nn.Module):
    """A network from planes to planes, in two resolutions, with a penalty on attention weights."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm = nn.Conv2d(2, 4, 3, 2, 1), nn.BatchNorm2d(4)
        self.gate, self.up = nn.Linear(4, 4), nn.Conv2d(6, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        coarse = F.relu(self.norm(self.down(x)))
        coarse = coarse * torch.sigmoid(self.gate(coarse.mean((2, 3))))[:, :, None, None]
        fine = F.interpolate(coarse, x.shape[2:], mode="bilinear", align_corners=False)
        return self.up(torch.cat([x, fine], 1))


def class_loss(y: Tensor, x: Tensor) -> Tensor:
    target = (x.flatten(1)[:, :1] > 0).long().squeeze(1)
    return F.cross_entropy(y, target, torch.tensor([1.0, 2.0, 3.0]).double()) + y.square().mean()


def plane_loss(y: Tensor, x: Tensor) -> Tensor:
    target = (x[:, 0] > 0).long()
    probability = y.softmax(1)[:, 1]
    return (
        F.cross_entropy(y, target, ignore_index=0)
        + F.binary_cross_entropy(probability, target.to(y.dtype))
        + (y.amax((1, 2, 3)) - y.flatten(1).std(1)).mean()
    )


def figures(model: nn.Module, x: Tensor) -> list[float]:
    """Return the figures that a program reports of a mini-batch."""
    with torch.no_grad():
        y = model(x)
        right = y.argmax(1) == 1
        return [
            right.sum().item(),
            right.to(x.dtype).mean().item(),
            y.max().item(),
            y.var().item(),
            (y - 1).abs().mean().item(),
            y.logsumexp((0, 1)).sum().item(),
        ]


def steps(model: nn.Module, batches: list[Tensor], loss: Any) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen = []
    for x in batches:
        optimizer.zero_grad()
        value = loss(model(x), x)
        value.backward()
        optimizer.step()
        seen += [value.item(), *figures(model, x)]
    return seen


@pytest.mark.parallel(list(GRIDS))
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("network, loss", [(Classifier, class_loss), (Segmenter, plane_loss)])
def test_training_with_a_small_last_batch_is_the_serial_training(
    network: type[nn.Module], loss: Any, sharded: bool
) -> None:
    for axes in GRIDS[MPI.COMM_WORLD.size]:
        if sharded and "channel" not in axes:
            continue
        rng = random.Random(0)
        torch.manual_seed(0)
        serial = network().double()
        grid = dc.ProcessGrid(**axes)
        model = dc.parallelize(copy.deepcopy(serial), grid, shard_parameters=sharded)
        parts = axes["sample"]
        batches = [random_tensor(rng, (n, 2, 9, 8)) for n in (parts, parts - 1, 1, parts + 1)]
        with noted(grid):
            expected = steps(serial, batches, loss)
            cut = [dc.distribute_tensor(x, grid).requires_grad_() for x in batches]
            assert steps(model, cut, loss) == pytest.approx(expected, rel=1e-9)
            for name, x in dc.full_state_dict(model).items():
                assert deviation(x, serial.state_dict()[name]) <= 1e-9, name
            wanted = batches[2].requires_grad_()
            model.zero_grad(), serial.zero_grad()
            cut[2].grad = None
            loss(model.eval()(cut[2]), cut[2]).backward()
            loss(serial.eval()(wanted), wanted).backward()
            assert deviation(cut[2].grad.full_tensor(), wanted.grad) <= 1e-9


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
