"""Batch normalisation modules, ghost batches, and arguments that are refused."""

from __future__ import annotations

import copy
import random
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import distconv as dc
from distconv import layers
from distconv.comm.ledger import trace_movements
from distconv.comm.packing import CHANNELS_LAST
from tests.support.serial import (
    TOLERANCE,
    agrees,
    deviation,
    examples,
    noted,
    random_grid,
    random_layout,
    random_tensor,
    refused,
    same_gradients,
    same_state,
)

RANKS = [1, 2, 4]
TORCH = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
DISTCONV = {1: layers.BatchNorm1d, 2: layers.BatchNorm2d, 3: layers.BatchNorm3d}


def equal_on_all_ranks(x: Tensor) -> bool:
    return len(set(MPI.COMM_WORLD.allgather(tuple(x.flatten().tolist())))) == 1


def buffers_agree(actual: nn.Module, expected: nn.Module) -> None:
    for (name, got), wanted in zip(actual.named_buffers(), expected.buffers(), strict=True):
        assert deviation(got, wanted) <= TOLERANCE, name
        assert equal_on_all_ranks(got), name


@pytest.mark.parallel([2])
@pytest.mark.parametrize("make", [TORCH, DISTCONV], ids=["torch.nn", "distconv.layers"])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.1}],
    ids=str,
)
def test_modules_train_and_evaluate_as_serial(make: Any, arguments: dict[str, Any]) -> None:
    rng = random.Random(3)
    for n in (1, 2, 3):
        serial = TORCH[n](3, **arguments).double()
        module = make[n](3, **arguments).double()
        grid = random_grid(rng)
        for step in range(4):
            serial.train(step < 3)
            module.train(step < 3)
            x = random_tensor(rng, (3, 3, *(rng.randrange(2, 7) for _ in range(n)))) + 5
            y = module(dc.distribute_tensor(x, grid, random_layout(rng, grid, x.shape)))
            assert deviation(y.full_tensor().detach(), serial(x).detach()) <= TOLERANCE
            buffers_agree(module, serial)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("channels", [24, 32])
def test_float32_statistics_of_ranks_with_other_means_are_right(channels: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, channels, 128, 128) + 1000
    x[:, :, 64:] += 1
    x = x.contiguous(memory_format=torch.channels_last)
    bn = nn.BatchNorm2d(channels, momentum=1.0)
    bn(dc.distribute_tensor(x, dc.ProcessGrid(height=-1)))
    truth = x.double()
    assert (bn.running_mean - truth.mean((0, 2, 3))).abs().max() < 2e-4
    assert (bn.running_var - truth.var((0, 2, 3))).abs().max() < 2e-4


def ghost_batches(x: Tensor, grid: dc.ProcessGrid, layout: dc.Layout, statistics: str) -> Any:
    """Return the boxes of global indices that share statistics, from the definition."""
    boxes = grid.comm.allgather((grid.coords["sample"], dc.local_box(x.shape, grid, layout)))
    if statistics == "local":
        return list({box for _, box in boxes})
    groups = {}
    for sample, box in boxes:
        low, high = groups.get(sample, (box.start, box.stop))
        groups[sample] = (tuple(map(min, low, box.start)), tuple(map(max, high, box.stop)))
    return [dc.Box(*g) for g in groups.values()]


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("statistics", ["sample", "local"])
def test_ghost_batches_equal_the_serial_norm_of_each_group(statistics: str) -> None:
    rng = random.Random(6)
    for _ in examples(10):
        grid = random_grid(rng, ["sample", "height", "width"])
        x = random_tensor(rng, (9, 2, 9, 10)) * 2 + 3
        layout = dc.default_layout(grid, 4)
        groups = ghost_batches(x, grid, layout, statistics)
        serial, module = nn.BatchNorm2d(2).double(), layers.BatchNorm2d(2, statistics=statistics)
        module.double().load_state_dict(serial.state_dict())
        batch_statistics = []

        def function(
            x: Tensor,
            weight: Tensor,
            bias: Tensor,
            module: Any = module,
            serial: Any = serial,
            groups: Any = groups,
            batch_statistics: Any = batch_statistics,
        ) -> Tensor:
            parameters = {"weight": weight, "bias": bias}
            if isinstance(x, dc.DistTensor):
                return torch.func.functional_call(module, parameters, (x,))
            y = torch.zeros_like(x)
            for box in groups:
                part = x[box.slices]
                mean, var = torch.zeros(2).double(), torch.ones(2).double()
                y[box.slices] = F.batch_norm(part, mean, var, weight, bias, True, 0.1)
                batch_statistics.append(torch.stack([mean, var]))
            return y

        parameters = [random_tensor(rng, [2]), random_tensor(rng, [2])]
        with noted(grid, groups):
            agrees(function, [x], parameters, grid, rng, [layout])
            mean, var = torch.stack(batch_statistics).mean(0)
            assert deviation(module.running_mean, mean) <= TOLERANCE
            assert deviation(module.running_var, var) <= TOLERANCE
            assert equal_on_all_ranks(module.running_mean) and equal_on_all_ranks(
                module.running_var
            )
            assert module.num_batches_tracked == 1


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("statistics", ["sample", "local"])
def test_ranks_without_samples_have_no_part_in_running_statistics(statistics: str) -> None:
    grid = dc.ProcessGrid(sample=-1)
    serial = nn.BatchNorm2d(3).double()
    model = dc.parallelize(layers.BatchNorm2d(3, statistics=statistics).double(), grid)
    x = random_tensor(random.Random(0), (1, 3, 4, 5))
    cut = dc.distribute_tensor(x, grid).requires_grad_()
    y, wanted = model(cut), serial(x.requires_grad_())
    assert deviation(y.detach().full_tensor(), wanted.detach()) <= 1e-12
    (y.square() + y).exp().mean().backward()
    (wanted.square() + wanted).exp().mean().backward()
    same_state(model, serial, 1e-12)
    same_gradients(model, serial, 1e-12)
    assert deviation(cut.grad.full_tensor(), x.grad) <= 1e-12


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("statistics", ["global", "sample", "local"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_layers_are_torch_layers_on_plain_tensors(n: int, statistics: str) -> None:
    rng = random.Random(7)
    plain, layer = TORCH[n](3), DISTCONV[n](3, statistics=statistics)
    assert layer.state_dict().keys() == plain.state_dict().keys()
    layer.load_state_dict(plain.state_dict())
    x = random_tensor(rng, (2, 3, *[4] * n), torch.float32)
    assert torch.equal(layer(x), plain(x))
    assert torch.equal(layer.eval()(x), plain.eval()(x))
    assert torch.equal(layer.running_var, plain.running_var)
    assert isinstance(layer, TORCH[n])


def test_an_unknown_choice_of_statistics_is_named() -> None:
    with pytest.raises(ValueError, match="statistics='all'.*'global', 'sample' or 'local'"):
        layers.BatchNorm2d(3, statistics="all")


@pytest.mark.parallel([2])
@pytest.mark.parametrize("statistics", ["sample", "local"])
def test_a_group_with_one_value_per_channel_is_refused_on_all_ranks(statistics: str) -> None:
    grid = dc.ProcessGrid(sample=-1)
    x = torch.rand(2 * grid.size - 1, 2, 1, 1, dtype=torch.float64)
    layer = layers.BatchNorm2d(2, statistics=statistics).double()
    refused(layer, [x], [], grid, random.Random(9), [None], ValueError)


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("training", [True, False])
def test_norms_of_cut_channels_move_statistics_alone(training: bool) -> None:
    grid = dc.ProcessGrid(channel=-1)
    channels = 2 * grid.size + 1
    torch.manual_seed(0)
    x = torch.randn(3, channels, 6, 5).double()
    d = dc.distribute_tensor(x, grid)
    for serial in (
        nn.BatchNorm2d(channels),
        nn.InstanceNorm2d(channels, affine=True, track_running_stats=True),
        nn.GroupNorm(channels, channels),
    ):
        serial = serial.double().train(training)
        norm = copy.deepcopy(serial)
        with trace_movements() as movements:
            y = norm(d)
        assert y.grid_layout == d.grid_layout
        assert deviation(y.full_tensor().detach(), serial(x).detach()) <= TOLERANCE
        buffers_agree(norm, serial)
        assert sum(m.bytes for m in movements) <= 8 * 2 * channels


@pytest.mark.parallel([2, 4])
def test_groups_of_channels_on_several_ranks_keep_the_cuts() -> None:
    rng = random.Random(12)
    grid = dc.ProcessGrid(channel=-1)
    for groups, channels in ((2, 6), (3, 12), (5, 10), (1, 3), (4, 16)):
        x, w = random_tensor(rng, (2, channels, 5)), random_tensor(rng, (channels,))
        agrees(lambda x, w, g=groups: F.group_norm(x, g, w), [x], [w], grid, rng, [None])
        y = F.group_norm(dc.distribute_tensor(x, grid), groups)
        assert y.grid_layout == dc.Layout(channel="channel")


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("axis", ["sample", "height", "width"])
@pytest.mark.parametrize("training", [True, False])
def test_a_sample_with_channels_last_meets_a_gradient_with_rows_last(
    axis: str, training: bool
) -> None:
    grid = dc.ProcessGrid(**{axis: -1})
    samples = grid.size if axis == "sample" else 1
    torch.manual_seed(0)
    x = torch.randn(samples, 4, 9, 8, dtype=torch.float64)
    x = x.contiguous(memory_format=torch.channels_last)
    dy = torch.randn(x.shape, dtype=torch.float64)
    serial = nn.BatchNorm2d(4).double().train(training)
    leaf = x.clone(memory_format=torch.contiguous_format).requires_grad_()
    serial(leaf).backward(dy)
    block = x[dc.distribute_tensor(x, grid).box.slices]
    last = block.contiguous(memory_format=torch.channels_last)
    for cut in (dc.distribute_tensor(x, grid), dc.DistTensor.from_local(last, grid)):
        module = dc.parallelize(nn.BatchNorm2d(4).double().train(training), grid)
        cut.requires_grad_()
        module(cut).backward(dc.distribute_tensor(dy, grid))
        assert deviation(cut.grad.full_tensor(), leaf.grad) <= TOLERANCE
        same_gradients(module, serial)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("given", ["", "weight", "bias", "weight and bias"])
@pytest.mark.parametrize("spatial", [(128, 33), (16, 8, 33)], ids=["planes", "volumes"])
def test_large_blocks_with_channels_last_equal_serial(
    spatial: tuple[int, ...], given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(5)
    first, *others = spatial
    axis = "height" if len(spatial) == 2 else "depth"
    grid = dc.ProcessGrid(**{axis: -1})
    x = random_tensor(rng, (2, 17, first * grid.size + 1, *others)) + 5
    x = x.contiguous(memory_format=CHANNELS_LAST[x.dim()])
    names = [name for name in ("weight", "bias") if name in given]
    multiplied, sizes = torch.addcmul, set()

    def norm(x: Tensor, *parameters: Tensor) -> Tensor:
        of_channels = dict(zip(names, parameters, strict=True))
        return F.batch_norm(x, None, None, training=True, **of_channels)

    def seen(*arguments: Any, **keywords: Any) -> Tensor:
        result = multiplied(*arguments, **keywords)
        sizes.add(result.numel())
        return result

    monkeypatch.setattr(torch, "addcmul", seen)
    agrees(norm, [x], [random_tensor(rng, (17,)) for _ in names], grid, rng, [None])
    assert prod(dc.local_box(x.shape, grid).shape) in sizes, "torch's batch norm has been called"


@pytest.mark.parallel([1, 2, 4])
def test_running_statistics_follow_when_a_checkpoint_computes_again() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = torch.randn(2, 3, 8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    modules = nn.BatchNorm2d(3).double(), dc.parallelize(nn.BatchNorm2d(3).double(), grid)
    for module, batch in zip(modules, (x, dc.distribute_tensor(x, grid)), strict=True):
        batch.requires_grad_()
        checkpoint(module, batch, use_reentrant=False).square().sum().backward()
    buffers_agree(*reversed(modules))


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("axis", ["sample", "channel", "width"])
@pytest.mark.parametrize("norm", [F.batch_norm, F.instance_norm])
@pytest.mark.parametrize("training", [False, True])
def test_distributed_running_statistics_are_read_and_updated(
    training: bool, norm: Any, axis: str
) -> None:
    rng = random.Random(0)
    grid = dc.ProcessGrid(**{axis: -1})
    mean, weight = random_tensor(rng, (3,)), random_tensor(rng, (3,))
    variance, x = mean.square() + 1, random_tensor(rng, (2, 3, 5, 4))

    def normalized(mean: Tensor, variance: Tensor, x: Tensor, weight: Tensor) -> Any:
        running = mean.detach().clone(), variance.detach().clone()
        return norm(x, *running, weight, None, training, 0.3), *running

    for cut in (dc.Layout(), dc.Layout.of(((axis,),))):
        # On 4 ranks some have no channels, or no samples.
        agrees(normalized, [mean, variance, x], [weight], grid, rng, [cut, cut, None])
        agrees(normalized, [mean, variance], [x, weight], grid, rng, [cut, cut])
