"""Sums in half precision are those of rounded parts, alike on all ranks, and halve the bytes."""

from __future__ import annotations

import copy
import random
from typing import Any
from unittest import mock

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn

import distconv as dc
from distconv.training import GradientCompression
from tests.model.test_parallelize import Branching, Twins, batch, grids, loss_of, net
from tests.support.serial import deviation, raised_everywhere, random_tensor

WORLD = MPI.COMM_WORLD
WIRES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
SHAPES = ((5, 3), (7,))


class Sum(nn.Module):
    """A module whose gradients are its inputs."""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(SHAPES[0], dtype=dtype))
        self.second = nn.Parameter(torch.zeros(SHAPES[1], dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (x * torch.cat((self.first.flatten(), self.second))).sum()


def parts(step: int, dtype: Any, ranks: int = WORLD.size) -> Tensor:
    """Return the gradient of every rank."""
    return random_tensor(random.Random(step), (ranks, 22), torch.float64).to(dtype)


def gradient_of(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sum_is_that_of_rounded_parts_rounded_once_more(wire: str, dtype: Any) -> None:
    grid = dc.ProcessGrid(sample=-1)
    model = dc.parallelize(Sum(dtype), grid)
    halves = GradientCompression(model, wire)
    for step in range(3):
        x = parts(step, dtype)
        halves.backward(model(dc.distribute_tensor(x, grid)))
        expected = x[0] if grid.size == 1 else rounded_sum(x, WIRES[wire]).to(dtype)
        assert torch.equal(gradient_of(model), expected)
        assert model.first.grad is not None and model.first.grad.dtype == dtype


def rounded_sum(x: Tensor, kind: Any) -> Tensor:
    total = torch.zeros(x.shape[1])
    for part in x:
        total += part.to(kind)
    return total.to(kind)


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("wire", WIRES)
def test_with_error_feedback_nothing_is_lost_in_the_long_run(wire: str) -> None:
    """Compare all that is delivered with the truth: only the rest of the last step is missing."""
    grid = dc.ProcessGrid(sample=-1)
    sums = {}
    for feedback in (False, True):
        model = dc.parallelize(Sum(torch.float32), grid)
        halves = GradientCompression(model, wire, error_feedback=feedback)
        delivered, truth = torch.zeros(22).double(), torch.zeros(22).double()
        for _ in range(64):
            x = parts(3, torch.float32)
            halves.backward(model(dc.distribute_tensor(x, grid)))
            delivered += gradient_of(model).double()
            truth += x.double().sum(0)
        sums[feedback] = (delivered - truth).abs()
    largest = parts(3, torch.float32).abs().sum(0).max().item()
    once = torch.finfo(WIRES[wire]).eps * largest
    assert sums[True].max() <= once < sums[False].max()


@pytest.mark.parallel([2, 4])
def test_half_the_bytes_travel() -> None:
    grid = dc.ProcessGrid(sample=-1)
    model = dc.parallelize(nn.Linear(40, 50, bias=False), grid)
    halves = GradientCompression(model)
    loss = model(dc.distribute_tensor(torch.ones(4, 40), grid)).sum()
    sent = []
    exchange, all_gather = grid.transport.exchange, grid.transport.all_gather

    def exchanged(arriving: Any, leaving: Any, tag: int) -> Any:
        sent.extend(tensor.nbytes for _, tensor in leaving)
        return exchange(arriving, leaving, tag)

    def gathered(tensor: Tensor, group: Any) -> Tensor:
        sent.append(tensor.nbytes * (group.size - 1))
        return all_gather(tensor, group)

    with (
        mock.patch.object(grid.transport, "exchange", exchanged),
        mock.patch.object(grid.transport, "all_gather", gathered),
        mock.patch.object(
            grid.transport, "all_reduce", wraps=grid.transport.all_reduce
        ) as all_reduce,
    ):
        halves.backward(loss)
    # That of the loss.
    assert [call.args[0].numel() for call in all_reduce.call_args_list] == [1]
    # A ring of float32 sends all but the own piece twice; here are a flag and padding as well.
    ring = 2 * 4 * 2000 * (grid.size - 1) // grid.size
    assert ring / 2 <= sum(sent) <= ring / 2 + 16 * grid.size


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("feedback", [False, True])
def test_models_get_the_serial_gradients_within_rounding(feedback: bool) -> None:
    def branching(seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return Branching().double()

    for make in (net, branching):
        for grid in grids(6, 2):
            twins = Twins(grid, make)
            halves = GradientCompression(twins.parallel, error_feedback=feedback)
            for step in range(4):
                for model in (twins.serial, twins.parallel):
                    model.choice = step // 2  # type: ignore[assignment]
                twins.serial.zero_grad()
                loss_of(twins.serial, *batch(step)).backward()
                halves.backward(loss_of(twins.parallel, *twins.inputs(step)))
                state = [[p.grad for p in m.parameters()] for m in (twins.serial, twins.parallel)]
                scale = max(g.abs().max().item() for g in state[0] if g is not None)
                for serial, parallel in zip(*state, strict=True):
                    assert (serial is None) == (parallel is None)
                    if serial is not None:
                        assert (parallel - serial).abs().max() <= 0.05 * scale
                assert (
                    WORLD.allgather([None if g is None else g.tolist() for g in state[1]])
                    == [[None if g is None else g.tolist() for g in state[1]]] * WORLD.size
                )


@pytest.mark.parallel([1, 2, 4])
def test_sharded_parameters_are_summed_over_those_that_hold_their_block() -> None:
    grid = dc.ProcessGrid(channel=2 if WORLD.size > 1 else 1, sample=-1)
    torch.manual_seed(0)
    serial = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 1))
    model = dc.parallelize(copy.deepcopy(serial), grid, shard_parameters=True)
    x = torch.randn(4, 4, 6, 5)
    serial(x).square().mean().backward()
    GradientCompression(model).backward(model(dc.distribute_tensor(x, grid)).square().mean())
    for p, q in zip(serial.parameters(), model.parameters(), strict=True):
        whole = q.grad.full_tensor() if isinstance(q.grad, dc.DistTensor) else q.grad
        assert deviation(whole, p.grad) <= 0.02


@pytest.mark.parallel([2])
def test_halves_travel_as_they_are() -> None:
    grid = dc.ProcessGrid(sample=-1)
    model = dc.parallelize(Sum(torch.float16), grid)
    x = parts(0, torch.float16)
    GradientCompression(model, "bfloat16").backward(model(dc.distribute_tensor(x, grid)))
    assert torch.equal(gradient_of(model), x.float().sum(0).half())


@pytest.mark.parallel([1, 2])
def test_what_cannot_be_compressed_is_refused_on_every_rank() -> None:
    model = dc.parallelize(Sum(torch.float32), dc.ProcessGrid(sample=-1))
    unknown = raised_everywhere(ValueError, GradientCompression, model, "int8")
    assert "wire='int8' is unknown; choose bfloat16 or float16" in unknown
    plain = raised_everywhere(ValueError, GradientCompression, Sum(torch.float32))
    assert "not parallelized" in plain
