"""The noise scale follows its formulas; gradients are those of an ordinary backward pass."""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import isnan

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn

import distconv as dc
from distconv.tensor.dist_tensor import DistTensor
from distconv.training import NoiseScale
from tests.model.test_parallelize import Branching, Twins, batch, grids, loss_of, net
from tests.support.serial import random_tensor

WORLD = MPI.COMM_WORLD
SIZES = (8, 3, 4)


class Sum(nn.Module):
    """A module with gradients x.sum(2) of a weight, and minus half of it of a bias, by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZES[1], dtype=torch.float64))
        self.bias = nn.Parameter(torch.ones(SIZES[1], dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * (self.weight - self.bias / 2)[:, None]).sum((1, 2))


def gradients(x: Tensor) -> Tensor:
    """Return the gradient of every sample."""
    own = x.sum(2)
    return torch.cat((own, -own / 2), 1)


def numbers(seed: int, samples: int = SIZES[0]) -> Tensor:
    return random_tensor(random.Random(seed), (samples, *SIZES[1:]))


def expected(units: Tensor, samples: int) -> tuple[float, float]:
    """Return the published estimates from the gradients of units."""
    n = len(units)
    b = samples / n
    small, large = units.square().sum(1).mean(), units.mean(0).square().sum()
    signal = (samples * large - b * small) / (samples - b)
    return signal.item(), ((small - large) / (1 / b - 1 / samples)).item()


def by_hand(x: Tensor, units: int) -> tuple[float, float]:
    return expected(gradients(x).reshape(units, -1, 2 * SIZES[1]).mean(1), len(x))


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("spatial", [1, 2])
def test_replicas_give_the_published_estimates(spatial: int) -> None:
    grid = dc.ProcessGrid(sample=-1, width=spatial)
    replicas = grid.shape["sample"]
    model = dc.parallelize(Sum(), grid)
    noise = NoiseScale(model, decay=0.5)
    signal = trace = 0.0
    for seed in range(3):
        x = numbers(seed)
        noise.backward(model(dc.distribute_tensor(x, grid)).mean(), len(x))
        if replicas > 1:
            one, other = by_hand(x, replicas)
            signal, trace = (signal + one) / 2, (trace + other) / 2
            assert noise.signal == pytest.approx(signal, rel=1e-12)
            assert noise.noise == pytest.approx(trace, rel=1e-12)
            known = signal > 0
            assert noise.value == pytest.approx(trace / signal) if known else isnan(noise.value)
        else:
            assert isnan(noise.value)
        assert set(WORLD.allgather((noise.signal, noise.noise))) == {(noise.signal, noise.noise)}


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("count", [2, 4])
def test_micro_batches_are_units_as_well(count: int) -> None:
    for axes in ({"sample": -1}, {"width": -1}):
        grid = dc.ProcessGrid(**axes)
        replicas = grid.shape["sample"]
        model = dc.parallelize(Sum(), grid)
        x = numbers(7, 16)

        def losses(
            x: Tensor = x, model: nn.Module = model, grid: dc.ProcessGrid = grid
        ) -> Iterator:
            for part in x.chunk(count):
                yield model(dc.distribute_tensor(part, grid)).mean() / count

        noise = NoiseScale(model, decay=0.0)
        noise.backward(losses(), 16)
        signal, trace = by_hand(x, count * replicas)
        assert noise.signal == pytest.approx(signal, rel=1e-12)
        assert noise.noise == pytest.approx(trace, rel=1e-12)
        mean = gradients(x).mean(0)
        assert torch.allclose(model.weight.grad, mean[: SIZES[1]], rtol=1e-13, atol=1e-15)
        assert model.unused.grad is None


@pytest.mark.parallel([2])
@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
def test_gradients_are_those_of_an_ordinary_backward_pass(bucket_bytes: int) -> None:
    def branching(seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return Branching().double()

    for make in (net, branching):
        for grid in grids(11):
            twins = Twins(grid, make, bucket_bytes=bucket_bytes)
            noise = NoiseScale(twins.parallel)
            for seed in range(4):
                for model in (twins.serial, twins.parallel):
                    model.choice = seed // 2  # type: ignore[assignment]
                if seed == 2:
                    twins.backward(9)
                twins.serial.zero_grad()
                loss_of(twins.serial, *batch(seed)).backward()
                noise.backward(loss_of(twins.parallel, *twins.inputs(seed)), 1)
                twins.check()
            twins.backward(8)
            twins.check()


@pytest.mark.parallel([2, 4])
def test_sharded_weights_count_once() -> None:
    results = []
    for axes, shard in (({"sample": 2, "channel": -1}, True), ({"sample": 2, "width": -1}, False)):
        grid = dc.ProcessGrid(**axes)
        torch.manual_seed(1)
        layer = nn.Sequential(nn.Conv2d(4, 6, 1), nn.Conv2d(6, 4, 3, padding=1)).double()
        model = dc.parallelize(layer, grid, shard_parameters=shard)
        if shard and grid.shape["channel"] > 1:
            assert isinstance(layer[0].weight, DistTensor)
        noise = NoiseScale(model, decay=0.0)
        x = dc.distribute_tensor(random_tensor(random.Random(1), (4, 4, 5, 6)), grid)
        noise.backward(model(x).square().mean(), 4)
        results.append((noise.signal, noise.noise))
    assert results[0] == pytest.approx(results[1], rel=1e-11)


@pytest.mark.parallel([1, 2])
def test_steps_that_say_nothing_leave_the_averages() -> None:
    grid = dc.ProcessGrid(sample=-1)
    model = dc.parallelize(Sum(), grid)
    noise = NoiseScale(model, decay=0.5)
    x = dc.distribute_tensor(numbers(0), grid)
    noise.backward(model(x).mean(), 2 * grid.size + 1)
    assert (noise.signal, noise.noise) == (0.0, 0.0) and isnan(noise.value)
    noise.backward((model(x).mean() * s for s in (torch.inf, 1.0)), 16)
    assert (noise.signal, noise.noise) == (0.0, 0.0)
    noise.backward((model(x * s).mean() for s in (1.0, 0.5)), 16)
    assert noise.signal and noise.noise
    again = NoiseScale(model)
    again.load_state_dict(noise.state_dict())
    assert (again.signal, again.noise) == (noise.signal, noise.noise)


@pytest.mark.parallel([1, 2])
def test_what_cannot_be_measured_is_refused() -> None:
    grid = dc.ProcessGrid(sample=-1)
    with pytest.raises(ValueError, match="not parallelized"):
        NoiseScale(Sum())
    model = dc.parallelize(Sum(), grid)
    with pytest.raises(ValueError, match="decay=1"):
        NoiseScale(model, decay=1)
    with pytest.raises(ValueError, match="there is no loss"):
        NoiseScale(model).backward([], 4)
    with pytest.raises(ValueError, match="samples=0 is not a count"):
        NoiseScale(model).backward([], 0)
    if grid.size > 1:
        by_channels = {"": dc.Layout(channel="sample")}
        layer = nn.Conv2d(4, 4, 1)
        dc.parallelize(layer, grid, layouts=by_channels, shard_parameters=True)
        with pytest.raises(ValueError, match="weight is partitioned over the axis sample"):
            NoiseScale(layer)
