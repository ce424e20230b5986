"""Ranks that train differently get an error, before gradients of different passes are added up."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn

import distconv as dc
from distconv.grid.journal import DivergenceError
from tests.support.serial import raised_everywhere

WORLD = MPI.COMM_WORLD


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3))


def batch(grid: dc.ProcessGrid, layout: dc.Layout | None = None) -> Tensor:
    return dc.distribute_tensor(torch.rand(4, 8, 8, 8), grid, layout)


def step(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("frozen", ["2.weight", "0.bias"])
def test_parameters_that_are_frozen_on_one_rank_are_named(frozen: str) -> None:
    torch.manual_seed(0)
    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(net(), grid, bucket_bytes=100)
    x = dc.distribute_tensor(torch.rand(4, 3, 8, 8), grid)
    step(model, x)
    p = model.get_parameter(frozen)
    p.requires_grad_(WORLD.rank != 1)
    message = raised_everywhere(RuntimeError, lambda: step(model, x))
    others = "rank 0" if WORLD.size == 2 else "ranks 0, 2"
    assert f"{frozen} is " in message and f"requires_grad=True on {others} and" in message
    assert "requires_grad=False on rank 1" in message and "identically on every rank" in message
    assert "; and" not in message and message.count(" on rank 1") == 1
    p.requires_grad_(True)
    model.zero_grad()
    step(model, x)
    totals = WORLD.allgather(p.grad.sum().item())
    assert totals == [totals[0]] * WORLD.size


@pytest.mark.parallel([2, 3])
def test_a_rank_whose_parameters_are_all_frozen_is_told_too() -> None:
    torch.manual_seed(0)
    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(net(), grid)
    x = dc.distribute_tensor(torch.rand(4, 3, 8, 8), grid).requires_grad_()
    model.requires_grad_(WORLD.rank == 0)
    message = raised_everywhere(RuntimeError, lambda: step(model, x))
    others = "rank 1" if WORLD.size == 2 else "ranks 1-2"
    assert f"requires_grad=False on {others}" in message


@pytest.mark.parallel([2, 3])
def test_memory_formats_that_differ_are_named() -> None:
    torch.manual_seed(0)
    grid = dc.ProcessGrid(sample=-1)
    model = dc.parallelize(net().to(memory_format=torch.channels_last), grid)
    if WORLD.rank == 1:
        model[0].to(memory_format=torch.contiguous_format)
    x = dc.distribute_tensor(torch.rand(4, 3, 8, 8), grid)
    message = raised_everywhere(RuntimeError, lambda: step(model, x))
    assert "0.weight is torch.float32 of strides (27, 1, 9, 3)" in message
    assert "(27, 9, 3, 1)" in message


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.conv(x)))


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("axis", ["sample", "height"])
@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("steps", [0, 20])
def test_modules_whose_modes_differ_are_named_before_any_of_them_computes(
    axis: str, records: bool, steps: int
) -> None:
    torch.manual_seed(0)
    grid = dc.ProcessGrid(**{axis: -1})
    model = dc.parallelize(Dropping(), grid)
    x = dc.distribute_tensor(torch.rand(4, 3, 8, 8), grid)
    others = "rank 0" if WORLD.size == 2 else "ranks 0, 2-3"
    for name in ("", "norm", "drop"):
        model.train()
        with torch.set_grad_enabled(records):
            for _ in range(steps):
                model(x)
            means = model.norm.running_mean.clone()
            model.get_submodule(name).train(WORLD.rank != 1)
            message = raised_everywhere(DivergenceError, lambda: model(x))
        named = f"{name or 'Dropping'} is in training mode on {others} and in evaluation mode on"
        assert f"{named} rank 1" in message and torch.equal(model.norm.running_mean, means)
        assert message.count(" is in training mode on") == (1 if name else 4)


@pytest.mark.parallel([2, 4])
def test_a_rank_that_records_no_gradients_is_named() -> None:
    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(net(), grid)
    x = dc.distribute_tensor(torch.zeros(4, 3, 16, 8), grid)
    with torch.set_grad_enabled(WORLD.rank != 1):
        message = raised_everywhere(DivergenceError, lambda: model(x))
    assert "the recording of gradients is on on rank" in message and "off on rank 1" in message
    model(x)


@pytest.mark.parallel([2])
def test_weights_that_a_step_after_no_sync_has_parted_are_told_with_the_cause(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(nn.Conv2d(1, 1, 3, padding=1), grid)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = dc.distribute_tensor(torch.arange(36.0).view(1, 1, 6, 6), grid)
    with dc.no_sync(model):
        model(x).square().sum().backward()
    optimizer.step()
    folder = MPI.COMM_WORLD.bcast(str(tmp_path_factory.mktemp("parted")))
    for call in (lambda: model(x), lambda: dc.save_checkpoint(folder, model, optimizer)):
        message = raised_everywhere(RuntimeError, call)
        assert "is not the same on all ranks" in message and "within no_sync" in message


@pytest.mark.parallel([2, 3])
def test_no_sync_on_one_rank_is_named() -> None:
    torch.manual_seed(0)
    grid = dc.ProcessGrid(sample=-1)
    model = dc.parallelize(net(), grid)
    x = dc.distribute_tensor(torch.rand(4, 3, 8, 8), grid)

    def accumulate() -> None:
        if WORLD.rank == 1:
            with dc.no_sync(model):
                step(model, x)
        else:
            step(model, x)

    message = raised_everywhere(RuntimeError, accumulate)
    assert "no_sync is off on rank" in message and "and on on rank 1" in message


@pytest.mark.parallel([2, 3])
def test_a_forward_pass_that_fails_does_not_spoil_the_next() -> None:
    grid = dc.ProcessGrid(sample=-1)
    model = dc.parallelize(net(), grid)
    torch.manual_seed(0)
    good, bad = torch.rand(4, 3, 8, 8), torch.rand(4, 5, 8, 8)
    for x in (bad, good, bad, good):
        d = dc.distribute_tensor(x, grid)
        if x is bad:
            with pytest.raises(RuntimeError, match="channels"):
                step(model, d)
        else:
            step(model, d)


@pytest.mark.parallel([2, 3])
def test_an_infinity_in_one_rank_s_block_makes_all_ranks_skip_the_step() -> None:
    torch.manual_seed(0)
    grid = dc.ProcessGrid(channel=-1)
    model = dc.parallelize(
        nn.Sequential(nn.Conv2d(8, 9, 3), nn.Conv2d(9, 6, 1)), grid, shard_parameters=True
    )
    assert any(isinstance(p, dc.DistTensor) for p in model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = batch(grid)
    for blown in (True, False):
        before = {n: p.clone() for n, p in dc.full_state_dict(model).items()}
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        if blown and WORLD.rank == 1:
            sharded = next(p for p in model.parameters() if isinstance(p, dc.DistTensor))
            sharded.grad.shard[:1] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        after = dc.full_state_dict(model)
        assert all(torch.equal(after[n], before[n]) == blown for n in after)
        assert WORLD.allgather(scaler.get_scale()) == [2.0] * WORLD.size


@pytest.mark.parallel([1, 2])
def test_a_module_that_was_called_is_freed_with_its_last_reference() -> None:
    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU()), grid)
    model(dc.distribute_tensor(torch.ones(1, 1, 8, 8), grid)).sum().backward()
    freed = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert freed() is None
    finally:
        gc.enable()
