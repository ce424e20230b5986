"""Models that are made and dropped leave nothing behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

import distconv as dc

WORLD = MPI.COMM_WORLD


def trained(grid: dc.ProcessGrid, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after two steps, one of them accumulated over two mini-batches."""
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.Conv2d(64, 4, 3))
    dc.parallelize(model, grid, **options)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        x = dc.distribute_tensor(torch.ones(grid.size, 3, 6, 6), grid)
        with dc.no_sync(model):
            model(x).square().mean().backward()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def leaves(model: nn.Module) -> Iterator[Tensor]:
    for p in model.parameters():
        yield p.shard if isinstance(p, dc.DistTensor) else p


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("shard", [False, True])
def test_a_model_that_is_dropped_frees_its_parameters(shard: bool) -> None:
    grid = dc.ProcessGrid(channel=-1)
    model, optimizer = trained(grid, shard_parameters=shard, bucket_bytes=100)
    parts = [*model.modules(), *leaves(model), *model.buffers()]
    alive = [weakref.ref(part) for part in parts]
    del model, optimizer, parts
    gc.collect()
    assert [x() for x in alive if x() is not None] == []


@pytest.mark.parallel([1, 2])
def test_memory_stays_flat_while_models_come_and_go() -> None:
    grid = dc.ProcessGrid(sample=-1)

    def elements() -> int:
        gc.collect()
        found = (x for x in gc.get_objects() if issubclass(type(x), Tensor))
        return sum(x.untyped_storage().nbytes() for x in found if not isinstance(x, dc.DistTensor))

    held = []
    for _ in range(6):
        trained(grid)
        held.append(elements())
    assert held[-1] == held[1], held


@pytest.mark.parallel([1, 2])
def test_a_loss_keeps_what_its_backward_pass_needs_of_a_dropped_module() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    model = dc.parallelize(nn.Conv2d(3, 2, 3, bias=False), grid)
    weight = model.weight
    serial = weight.detach().clone().requires_grad_()
    loss = model(dc.distribute_tensor(x, grid)).square().mean()
    del model
    gc.collect()
    loss.backward()
    F.conv2d(x, serial).square().mean().backward()
    assert torch.allclose(weight.grad, serial.grad, atol=1e-6)
