"""Samples lie with channels last where convolutions gain by it, wherever they come from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import distconv as dc
from distconv.data import Dataset, distribute

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)
one_and_two = pytest.mark.parallel([1, 2])

SHAPE = 2, 4, 128, 96
CUTS: list[dict[str, int]] = [{"sample": -1}, {"height": -1}, {"width": -1}]


def is_last(x: Any) -> bool:
    block = x.to_local()
    return block.is_contiguous(memory_format=torch.channels_last) and not block.is_contiguous()


@one_and_two
@pytest.mark.parametrize("extents", CUTS, ids=str)
def test_distributed_tensors(extents: dict[str, int]) -> None:
    grid = dc.ProcessGrid(**extents, device="cpu")

    def last(*shape: int, **more: Any) -> bool:
        x = torch.randn(*shape, **more)
        made = dc.distribute_tensor(x, grid)
        assert torch.equal(made.full_tensor(), x)
        return is_last(made)

    assert last(*SHAPE)
    assert last(2, 32, 64, 64)
    assert last(2, 64, 64, 64)
    assert not last(2, 4, 16, 16)
    assert not last(2, 4, 64, 64, 4)
    assert not last(*SHAPE, dtype=torch.float64)
    assert not last(*SHAPE, requires_grad=True)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not last(*SHAPE)
        theirs = torch.randn(SHAPE).contiguous(memory_format=torch.channels_last)
        assert is_last(dc.distribute_tensor(theirs, grid)) or "width" in extents


@one_and_two
@pytest.mark.parametrize("extents", CUTS, ids=str)
def test_mini_batches(extents: dict[str, int]) -> None:
    grid = dc.ProcessGrid(**extents, device="cpu")
    x = torch.randn(SHAPE)
    targets = torch.randint(9, (2, 128, 96))
    loader = DataLoader(TensorDataset(x, targets), batch_size=2)
    data = Dataset({"x": x.numpy(), "y": targets.numpy()}, grid, "x", "y")
    for samples, classes in (*distribute(loader, grid), data.batch([0, 1])):
        assert is_last(samples) and classes.to_local().is_contiguous()
        assert torch.equal(samples.full_tensor(), x)
        assert torch.equal(classes.full_tensor(), targets)


@one_and_two
def test_blocks_of_the_program_stay_as_they_are() -> None:
    grid = dc.ProcessGrid(height=-1, device="cpu")
    block = torch.randn(dc.local_box(SHAPE, grid).shape)
    x = dc.DistTensor.from_local(block, grid)
    assert not is_last(x)
    block.zero_()
    assert not x.full_tensor().any()


@one_and_two
def test_what_a_transform_gets_has_channels_first() -> None:
    grid = dc.ProcessGrid(height=-1, device="cpu")
    given: list[bool] = []

    def scale(block: Tensor, box: Any) -> Tensor:
        given.append(block.is_contiguous())
        return block.view(-1).mul_(2).view(block.shape)

    x = np.random.default_rng(0).random(SHAPE, np.float32)
    made: Any = Dataset(x, grid, transform=scale).batch([0, 1])
    assert is_last(made) and given == [True]
    assert np.array_equal(made.full_tensor().numpy(), 2 * x)
