"""The gradient of a split along channels is one tensor in the format of its input."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import distconv as dc
from tests.support.kernels import Kernels
from tests.support.serial import agrees, random_tensor


@pytest.mark.parallel([2])
@pytest.mark.parametrize(
    "divide",
    [
        lambda x: x.chunk(2, 1),
        lambda x: x.split(3, 1),
        lambda x: torch.split_with_sizes(x, [4, 2], dim=-3),
    ],
)
def test_gradients_of_parts_are_joined_in_the_format_of_the_input(
    divide: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> None:
    grid, rng = dc.ProcessGrid(height=-1), random.Random(1)

    def gate(x: Tensor) -> Tensor:
        a, b = divide(x)
        return a.sin()[:, :2] * b[:, :2]

    given = random_tensor(rng, (2, 6, 7, 5))
    for layout in (dc.Layout(height="height"), dc.Layout(channel="height")):
        agrees(gate, [given], [], grid, rng, [layout])
    layout = dc.Layout(height="height")
    block = dc.distribute_tensor(given, grid, layout).shard.to(memory_format=torch.channels_last)
    x = dc.DistTensor(block, given.shape, ((), (), ("height",), ()), grid).requires_grad_()
    parts = divide(x)
    seeds = [torch.ones_like(part) for part in parts]
    with Kernels() as kernels:
        (gradient,) = torch.autograd.grad(parts, x, seeds)
    assert gradient.shard.is_contiguous(memory_format=torch.channels_last)
    assert kernels.counted == {"cat": 1}, kernels.counted


@pytest.mark.parallel([2])
def test_parts_of_unsafe_splits_may_be_written_to() -> None:
    grid, rng = dc.ProcessGrid(height=-1), random.Random(2)

    def doubled(x: Tensor) -> Tensor:
        a, b = (2 * x).unsafe_chunk(2, 1)
        a *= 3
        return a + b

    layout = dc.Layout(height="height")
    agrees(doubled, [random_tensor(rng, (2, 4, 7, 5))], [], grid, rng, [layout])
