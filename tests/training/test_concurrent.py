"""Gradients of several models are reduced at once, in another order on every rank."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn

import distconv as dc
from distconv.training import ConcurrentReductions, NoiseScale
from tests.support.serial import deviation, raised_everywhere, same_gradients

WORLD = MPI.COMM_WORLD


def models(n: int) -> list[nn.Module]:
    """Return networks alike in shape, so that only their communicators tell their sums apart."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double() for _ in range(n)]


def inputs(step: int) -> Tensor:
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(step)).double()


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("ordered", [False, True])
def test_backward_passes_in_another_order_on_every_rank_give_the_serial_gradients(
    ordered: bool, monkeypatch: pytest.MonkeyPatch, first_calls: None
) -> None:
    grid = dc.ProcessGrid(sample=-1)
    monkeypatch.setattr(grid.transport, "ordered", ordered, raising=False)
    serial = models(3)
    # Several buckets for each.
    parallel = [dc.parallelize(copy.deepcopy(m), grid, bucket_bytes=200) for m in serial]
    both = ConcurrentReductions(*parallel)
    for step in range(6):
        x = dc.distribute_tensor(inputs(step), grid)
        losses = [model(x).square().mean() for model in parallel]
        order = random.Random(10 * step + WORLD.rank).sample(range(3), 3)
        with both:
            for i in order:
                losses[i].backward()
        for one, other in zip(serial, parallel, strict=True):
            one(inputs(step)).square().mean().backward()
            same_gradients(other, one, 1e-12)
            if step % 2:
                one.zero_grad()
                other.zero_grad()
    # And without the context.
    parallel[0](dc.distribute_tensor(inputs(9), grid)).square().mean().backward()
    serial[0](inputs(9)).square().mean().backward()
    assert (
        deviation(next(parallel[0].parameters()).grad, next(serial[0].parameters()).grad) <= 1e-12
    )


@pytest.mark.parallel([2])
def test_parts_left_by_no_sync_and_models_without_a_pass_are_right() -> None:
    grid = dc.ProcessGrid(sample=-1)
    serial = models(3)
    parallel = [dc.parallelize(copy.deepcopy(m), grid) for m in serial]
    both = ConcurrentReductions(*parallel)
    x = dc.distribute_tensor(inputs(0), grid)
    parallel[2](x).sum().backward()
    with dc.no_sync(parallel[0]):
        parallel[0](x).sum().backward()
    losses = [model(x).sum() for model in parallel[:2]]
    with both:
        for i in (0, 1) if WORLD.rank else (1, 0):
            losses[i].backward()
    for model, passes in zip(serial, (2, 1, 1), strict=True):
        (passes * model(inputs(0)).sum()).backward()
    for one, other in zip(serial, parallel, strict=True):
        same_gradients(other, one, 1e-12)


@pytest.mark.parallel([2])
def test_misuse_is_an_error_on_every_rank_and_the_next_step_is_right() -> None:
    grid = dc.ProcessGrid(sample=-1)
    whole = dc.parallelize(nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3)).double(), grid)
    other = dc.parallelize(models(1)[0], grid)
    message = raised_everywhere(ValueError, ConcurrentReductions, whole[0], whole[1])
    assert "submodules of one parallelized module" in message
    plain = raised_everywhere(ValueError, ConcurrentReductions, other, models(1)[0])
    assert "not parallelized" in plain
    both = ConcurrentReductions(whole, other)
    x = dc.distribute_tensor(inputs(0), grid)
    losses = [whole(x).sum(), whole(x).sum(), other(x).sum()]

    def twice() -> None:
        with both:
            losses[0].backward()
            losses[1].backward()

    assert "a second backward pass" in raised_everywhere(RuntimeError, twice)
    whole.zero_grad()
    with both:
        losses[2].backward()
        whole(x).sum().backward()
    serial = copy.deepcopy(models(1)[0])
    serial(inputs(0)).sum().backward()
    same_gradients(other, serial, 1e-12)


@pytest.mark.parallel([2])
def test_a_plain_backward_pass_adds_to_sums_that_travelled_otherwise() -> None:
    grid = dc.ProcessGrid(sample=-1)
    serial = models(1)[0]
    x = dc.distribute_tensor(inputs(0), grid)
    model = dc.parallelize(models(1)[0], grid)
    NoiseScale(model).backward(model(x).square().mean(), 8)
    model(x).sum().backward()
    (serial(inputs(0)).square().mean() + serial(inputs(0)).sum()).backward()
    same_gradients(model, serial, 1e-12)
