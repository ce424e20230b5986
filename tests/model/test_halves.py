"""Gradients that travel as halves are the sums of rounded parts, alike on all ranks."""

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
from tests.model.test_parallelize import Branching, Twins, batch, grids, loss_of, net
from tests.support.serial import raised_everywhere, random_tensor, same_gradients

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


def parts(step: int, dtype: Any) -> Tensor:
    """Return the gradient of every rank."""
    return random_tensor(random.Random(step), (WORLD.size, 22), torch.float64).to(dtype)


def gradient(model: nn.Module, x: Tensor) -> Tensor:
    """Return the gradient of a `Sum` in a step in which ranks have the rows of `x`."""
    model.zero_grad()
    model(dc.distribute_tensor(x, dc.ProcessGrid(sample=-1))).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def rounded_sum(x: Tensor, kind: Any) -> Tensor:
    total = torch.zeros(x.shape[1])
    for part in x:
        total += part.to(kind)
    return total.to(kind)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_a_sum_is_that_of_rounded_parts_rounded_once_more(wire: str, dtype: Any) -> None:
    model = dc.parallelize(Sum(dtype), dc.ProcessGrid(sample=-1), wire=wire)
    for step in range(3):
        x = parts(step, dtype)
        # Halves travel as they are.
        kind = dtype if dtype == torch.float16 else WIRES[wire]
        expected = x[0] if WORLD.size == 1 else rounded_sum(x, kind).to(dtype)
        assert torch.equal(gradient(model, x), expected)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("wire", WIRES)
def test_with_error_feedback_nothing_is_lost_in_the_long_run(wire: str) -> None:
    """Compare all that is delivered with the truth: only the rest of the last step is missing."""
    sums = {}
    for feedback in (False, True):
        grid = dc.ProcessGrid(sample=-1)
        model = dc.parallelize(Sum(torch.float32), grid, wire=wire, error_feedback=feedback)
        if wire == "float16":  # infinite in a step that is not carried on
            assert gradient(model, torch.full((WORLD.size, 22), 1e6)).isinf().all()
        delivered, truth = torch.zeros(22).double(), torch.zeros(22).double()
        for _ in range(64):
            x = parts(3, torch.float32)
            delivered += gradient(model, x).double()
            truth += x.double().sum(0)
        sums[feedback] = (delivered - truth).abs()
    largest = parts(3, torch.float32).abs().sum(0).max().item()
    once = torch.finfo(WIRES[wire]).eps * largest
    assert sums[True].max() <= once < sums[False].max()


@pytest.mark.parallel([2, 4])
def test_half_the_bytes_travel() -> None:
    grid = dc.ProcessGrid(sample=-1)
    model = dc.parallelize(nn.Linear(40, 50, bias=False), grid, wire="bfloat16")
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
    ):
        loss.backward()
    # A ring of float32 sends all but the own piece twice; here are a flag and padding as well.
    ring = 2 * 4 * 2000 * (grid.size - 1) // grid.size
    assert ring / 2 <= sum(sent) <= ring / 2 + 16 * grid.size


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("shard", ["zero2", "zero3"])
def test_weights_sharded_over_samples_are_summed_over_them_in_their_own_type(shard: str) -> None:
    grid = dc.ProcessGrid(sample=2, height=-1)
    x = random_tensor(random.Random(0), (4, 3, 8, 8), torch.float64).float()

    def gradients(**options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = dc.parallelize(nn.Conv2d(3, 4, 3, padding=1), grid, shard=shard, **options)
        model(dc.distribute_tensor(x, grid)).square().sum().backward()
        return [model.weight.grad.full_tensor(), model.bias.grad]

    (weight, bias), halves = gradients(), gradients(wire="bfloat16")
    rounded = [g.to(torch.bfloat16).float() for g in halves]
    assert torch.equal(halves[1], rounded[1]) and not torch.equal(bias, rounded[1])
    if grid.size == 2:  # nothing is left to sum
        assert torch.equal(halves[0], weight)
    else:
        assert torch.equal(halves[0], rounded[0]) and not torch.equal(weight, rounded[0])
    for half, exact in zip(halves, (weight, bias), strict=True):
        assert (half - exact).abs().max() <= 2**-7 * exact.abs().max()


@pytest.mark.parallel([2])
@pytest.mark.parametrize("feedback", [False, True])
def test_models_get_the_serial_gradients_within_rounding(feedback: bool) -> None:
    def branching(seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return Branching().double()

    for make in (net, branching):
        for grid in grids(6, 2):
            twins = Twins(grid, make, wire="bfloat16", error_feedback=feedback, bucket_bytes=100)
            for step in range(4):
                for model in (twins.serial, twins.parallel):
                    model.choice = step // 2  # type: ignore[assignment]
                    if step != 1:  # the second pass adds to the sums of the first
                        model.zero_grad()
                loss_of(twins.serial, *batch(step)).backward()
                loss_of(twins.parallel, *twins.inputs(step)).backward()
                state = [[p.grad for p in m.parameters()] for m in (twins.serial, twins.parallel)]
                scale = max(g.abs().max().item() for g in state[0] if g is not None)
                for serial, parallel in zip(*state, strict=True):
                    assert (serial is None) == (parallel is None)
                    if serial is not None:
                        assert (parallel - serial).abs().max() <= 0.05 * scale
                mine = [None if g is None else g.tolist() for g in state[1]]
                assert WORLD.allgather(mine) == [mine] * WORLD.size


@pytest.mark.parallel([1, 2, 4])
def test_sharded_parameters_are_summed_over_those_that_hold_their_block() -> None:
    grid = dc.ProcessGrid(channel=2 if WORLD.size > 1 else 1, sample=-1)
    torch.manual_seed(0)
    serial = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 1))
    model = copy.deepcopy(serial)
    dc.parallelize(model, grid, shard_parameters=True, wire="bfloat16")
    x = torch.randn(4, 4, 6, 5)
    serial(x).square().mean().backward()
    model(dc.distribute_tensor(x, grid)).square().mean().backward()
    same_gradients(model, serial, 0.02)


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"wire": "int8"}, "wire='int8' is unknown; choose bfloat16 or float16"),
        ({"error_feedback": True}, "error_feedback=True requires a 16-bit type"),
    ],
)
def test_options_that_are_none_are_refused_on_every_rank(options: Any, words: str) -> None:
    grid = dc.ProcessGrid(sample=-1)
    assert words in raised_everywhere(
        ValueError, lambda: dc.parallelize(nn.Linear(2, 2), grid, **options)
    )
