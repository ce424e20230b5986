"""Steps, models and grids that are over leave nothing behind; `soak.py` is the long form."""

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
from tests.support.soak import make_and_drop, train

WORLD = MPI.COMM_WORLD


@pytest.fixture(autouse=True)
def young_heap() -> None:
    """Let the garbage collector look at nothing that earlier tests have left."""
    gc.collect()
    gc.freeze()


def trained(grid: dc.ProcessGrid, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and optimizer after two steps, each accumulated over two mini-batches."""
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


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("shard", [False, True])
def test_a_model_that_is_dropped_frees_its_parameters(shard: bool) -> None:
    grid = dc.ProcessGrid(channel=-1)
    model, optimizer = trained(grid, shard_parameters=shard, bucket_bytes=100)
    parts = [*model.modules(), *leaves(model), *model.buffers()]
    alive = [weakref.ref(part) for part in parts]
    del model, optimizer, parts
    gc.collect()
    assert [x() for x in alive if x() is not None] == []


@pytest.mark.parallel([2])
def test_tensors_stay_flat_while_shapes_change() -> None:
    marks, _ = train(rounds=3, shapes=5)
    assert marks[2].tensors == marks[1].tensors, marks
    assert marks[2].communicators == marks[1].communicators, marks


@pytest.mark.parallel([2, 3])
def test_communicators_and_tensors_stay_flat_while_grids_come_and_go() -> None:
    marks = make_and_drop(rounds=3, models=4)
    assert marks[2].tensors == marks[1].tensors, marks
    assert marks[2].communicators == marks[1].communicators, marks


@pytest.mark.parallel([2, 3])
def test_a_leaf_is_freed_without_the_garbage_collector() -> None:
    grid = dc.ProcessGrid(height=-1)
    gc.collect()
    gc.disable()
    try:
        x = dc.distribute_tensor(torch.ones(4), grid, dc.Layout()).requires_grad_()
        (x * 2).sum().backward()
        assert x.grad is not None
        alive = weakref.ref(x.shard)
        del x
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parallel([2])
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
