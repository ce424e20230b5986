"""Normalisations of each sample by itself: large means, single values."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import distconv as dc
from distconv import layers
from tests.support.serial import agrees, deviation, examples, noted, random_grid, random_tensor

RANKS = [1, 2, 4]


@pytest.mark.parallel(RANKS)
def test_group_norm_of_one_value_for_each_channel_of_a_rank() -> None:
    # torch refuses that of a whole batch, not of a block.
    rng, grid = random.Random(2), dc.ProcessGrid(sample=-1)
    x = random_tensor(rng, (grid.size + 1, 1, 1, 1))
    agrees(lambda x: F.group_norm(x, 1), [x], [], grid, rng, [dc.Layout(sample="sample")])


@pytest.mark.parallel([2, 4])
def test_a_large_mean_does_not_cancel_in_single_precision() -> None:
    rng = random.Random(6)
    x = random_tensor(rng, (2, 4, 33, 17), torch.float32) + 1000
    expected = F.group_norm(x.double(), 2)
    actual = F.group_norm(dc.distribute_tensor(x, random_grid(rng)), 2).full_tensor()
    assert deviation(actual.double(), expected) < 1e-3


@pytest.mark.parallel(RANKS)
def test_local_statistics_are_those_of_each_block_of_the_plane() -> None:
    rng = random.Random(7)
    for _ in examples(10):
        grid = random_grid(rng, ["sample", "channel", "height", "width"])
        x = random_tensor(rng, (3, 8, 9, 5)) * 2 + 3
        layout = dc.default_layout(grid, 4)
        boxes = grid.comm.allgather(dc.local_box(x.shape, grid, layout).slices[2:])
        planes = [box for place, box in enumerate(boxes) if box not in boxes[:place]]
        layer = layers.GroupNorm(4, 8, statistics="local").double()

        def function(
            x: Tensor, weight: Tensor, bias: Tensor, layer: Any = layer, planes: Any = planes
        ) -> Tensor:
            if isinstance(x, dc.DistTensor):
                parameters = {"weight": weight, "bias": bias}
                return torch.func.functional_call(layer, parameters, (x,))
            y = torch.zeros_like(x)
            for box in planes:
                height, width = box
                part = x[:, :, height, width]
                y[:, :, height, width] = F.group_norm(part, 4, weight, bias)
            return y

        with noted(grid, planes):
            agrees(function, [x], [random_tensor(rng, [8]) for _ in range(2)], grid, rng, [layout])


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("statistics", ["global", "local"])
def test_group_norm_is_torchs_on_plain_tensors_and_where_the_plane_is_whole(
    statistics: str,
) -> None:
    plain, layer = nn.GroupNorm(2, 4), layers.GroupNorm(2, 4, statistics=statistics)
    layer.load_state_dict(plain.state_dict())
    x = random_tensor(random.Random(8), (2, 4, 6), torch.float32)
    assert torch.equal(layer(x), plain(x))
    cut = dc.distribute_tensor(x, dc.ProcessGrid(sample=-1))
    assert deviation(layer(cut).full_tensor(), plain(x)) < 1e-6
    assert repr(layer) == f"{repr(plain)[:-1]}, statistics={statistics})"


def test_statistics_that_group_norm_does_not_know_are_named() -> None:
    with pytest.raises(ValueError, match="statistics='sample'.*'global' or 'local'"):
        layers.GroupNorm(2, 4, statistics="sample")


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(4),
    "batch, evaluation": lambda: nn.BatchNorm2d(4).eval(),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True),
    "group": lambda: nn.GroupNorm(2, 4),
    "layer": lambda: nn.LayerNorm(5),
    "root mean square": lambda: nn.RMSNorm(5),
    "convolution": lambda: nn.Conv2d(4, 4, 3, padding=1),
    "transposed convolution": lambda: nn.ConvTranspose2d(4, 4, 3),
    "linear": lambda: nn.Linear(5, 5),
    "PReLU": lambda: nn.PReLU(4),
}


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("axis", ["sample", "height"])
@pytest.mark.parametrize("name", LAYERS)
def test_weights_set_by_data_before_the_backward_pass_have_the_gradients_of_torch(
    name: str, axis: str
) -> None:
    grid = dc.ProcessGrid(**{axis: -1})
    x = random_tensor(random.Random(0), (4, 4, 6, 5))

    def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
        y = module(x)
        module.weight.data.mul_(3)
        (y**3).sum().backward()
        return [x.grad, *(p.grad for p in module.parameters())]

    torch.manual_seed(0)
    serial = LAYERS[name]().double()
    module = dc.parallelize(copy.deepcopy(serial), grid)
    expected = gradients(serial, x.clone().requires_grad_())
    first, *others = gradients(module, dc.distribute_tensor(x, grid).requires_grad_())
    for ours, torchs in zip([first.full_tensor(), *others], expected, strict=True):
        assert deviation(ours, torchs) < 1e-12


@pytest.mark.parallel(RANKS)
def test_local_response_norm_of_blocks_with_other_strides_on_each_rank() -> None:
    # The last rank's block has a single column, and so strides that torch can view as it needs.
    x = random_tensor(random.Random(3), (2, 5, 2, 3, 2 * dc.ProcessGrid(width=-1).size - 1))
    grid = dc.ProcessGrid(width=-1)
    turned = dc.distribute_tensor(x.transpose(3, 4).contiguous(), grid, dc.Layout(height="width"))
    for y in (turned.transpose(3, 4), dc.distribute_tensor(x, grid, dc.Layout(channel="width"))):
        y.requires_grad_()
        F.local_response_norm(y, 3).square().sum().backward()
        serial = x.clone().requires_grad_()
        F.local_response_norm(serial, 3).square().sum().backward()
        torch.testing.assert_close(y.grad.full_tensor(), serial.grad)
