"""Predictions of a step with sharded weights, recomputation, accumulation and offloading."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import distconv as dc
from benchmarks.measuring.memory import peak_of
from distconv.planning import plan, predict
from distconv.planning.machine import Table
from distconv.planning.recorded_step import record_step
from distconv.planning.recording import Compute, Start
from distconv.planning.scaling import sleep_until_all_are_here
from tests.planning.machines import described
from tests.planning.test_recorder import step_on

SHAPE, SMALL = (4, 8, 16, 16), (8, 64, 4, 4)


class Block(nn.Sequential):
    """A convolution, a norm and an activation function."""


def network(blocks: int = 3, wide: int = 8) -> nn.Module:
    return nn.Sequential(
        *(
            Block(nn.Conv2d(wide, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU())
            for _ in range(blocks)
        )
    )


class Recomputed(nn.Module):
    """`network` as a user writes it with checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = network()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:  # type: ignore[attr-defined]
            x = checkpoint(block, x, use_reentrant=False)
        return x


def events(module: nn.Module, **options: Any) -> Any:
    return record_step(module, [SHAPE], {"sample": 2, "height": 2}, **options)


def test_checkpoints_of_a_kind_are_those_that_a_program_writes() -> None:
    events(network())  # constants are made in the first step
    expected = events(Recomputed())
    for chosen in ("Block", "blocks", ["0", "1", "2"], "[0-2]"):
        found = events(network(), checkpoint=chosen)
        assert found.peak == expected.peak and found.operators == expected.operators
    assert expected.peak < events(network()).peak
    with pytest.raises(ValueError, match="choose blocks, or one of Block, Conv2d"):
        events(network(), checkpoint="Bloc")


def test_accumulated_mini_batches_share_one_sum_and_one_step() -> None:
    events(network())  # constants are made in the first step
    once, thrice = events(network()), events(network(), accumulate=3)

    def count(recording: Any, *phases: str) -> int:
        computed = (e for e in recording.events if isinstance(e, Compute))
        return sum(e.place.phase in phases and e.place.layer != "gradients" for e in computed)

    def sums(recording: Any) -> int:
        started = (e for e in recording.events if isinstance(e, Start))
        return sum(e.place.layer == "gradients" for e in started)

    assert count(thrice, "forward", "backward") == 3 * count(once, "forward", "backward")
    assert count(thrice, "optimizer") == count(once, "optimizer") > 0
    assert sums(thrice) == sums(once) > 0
    assert thrice.calls == once.calls and thrice.kept == once.kept
    # The gradients of the mini-batches before are there while the next one computes.
    assert once.peak < thrice.peak
    with pytest.raises(ValueError, match="accumulate=0; expected a number"):
        events(network(), accumulate=0)


def test_offloaded_activations_are_not_on_the_device() -> None:
    kept, offloaded = events(network(6), gpu=True), events(network(6), gpu=True, offload=True)
    activations = kept.memory["activations"]
    assert offloaded.peak < kept.peak - activations / 2
    with pytest.raises(ValueError, match="offload=True, but the ranks compute on CPUs"):
        predict(network(), SHAPE, {}, described(), offload=True)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw", "rmsprop", "adagrad"])
def test_the_state_of_each_optimizer_is_counted(name: str) -> None:
    copies = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2, "rmsprop": 1, "adagrad": 1}[name]
    found = record_step(network(3, 32), [(4, 32, 4, 4)], {}, optimizer=name)
    state, weights = found.memory["optimizer state"], found.parameter_bytes
    assert abs(state - copies * weights) < 0.01 * weights + 1


def test_sharded_weights_are_predicted_where_all_else_is_equal() -> None:
    wide, machine = network(4, 64), described()
    peaks = {
        shard: predict(wide, SMALL, {"sample": 8}, machine, shard=shard, optimizer="adam").peak
        for shard in (None, "zero2", "zero3")
    }
    assert peaks["zero3"] < peaks["zero2"] < peaks[None] / 2


def test_where_nothing_fits_the_cheapest_changes_come_first() -> None:
    wide, machine, options = network(4, 64), described(), {"optimizer": "adam"}
    whole = predict(wide, SMALL, {"sample": 8}, machine, **options)
    found = plan(wide, SMALL, 8, machine, memory=whole.peak // 2, axes=("sample",), **options)
    ways = [way.what.split(" on ")[0] for way in found.ways_out]
    assert ways[:5] == [
        'shard="zero2"',
        'shard="zero3"',
        "shard_parameters=True",
        # Checkpoints alone save nothing: weights take most of the memory.
        'shard="zero3" and checkpointing each block',
        "bfloat16",
    ]
    fits = {way.what.split(" on ")[0]: way.fits for way in found.ways_out}
    assert fits['shard="zero3"']
    assert all(way.fits == (way.peak <= whole.peak // 2) for way in found.ways_out)
    best = plan(
        wide,
        SMALL,
        8,
        machine,
        memory=whole.peak // 2,
        axes=("sample",),
        shard="zero3",
        **options,
    )
    assert best.grid == {"sample": 8}


def test_changes_that_save_no_memory_are_not_listed() -> None:
    tiny = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1))
    step = (tiny, (4, 3, 64, 64), {"sample": 2})
    plain, again = (predict(*step, described(), checkpoint=c).peak for c in ((), "blocks"))
    assert again >= plain
    found = plan(*step[:2], 2, described(), memory=10_000, axes=("sample",))
    assert found.ways_out and all(way.peak < plain for way in found.ways_out)


def test_a_graph_needs_no_python_between_its_kernels() -> None:
    host = {"*": Table((0.0,), (1e-3,)), "parameter": Table((0.0,), (1e-4,))}
    slow = dataclasses.replace(described(asynchronous=True), host=host)
    step = (network(), SHAPE, {"height": 2})
    eager, replayed = predict(*step, slow), predict(*step, slow.in_graph())
    assert replayed.seconds < eager.seconds / 3
    fast = dataclasses.replace(slow, host={"parameter": host["parameter"]})
    assert replayed.seconds == predict(*step, fast).seconds
    assert slow.in_graph().operators is slow.operators
    with pytest.raises(ValueError, match="CPUs, which have no graphs"):
        described().in_graph()


# Networks of shapes that no other test or benchmark has.


class Down(nn.Module):
    """A residual block of a 3-D classifier, which halves the sides."""

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        self.a = nn.Conv3d(channels, filters, 3, 2, 1, bias=False)
        self.norm = nn.GroupNorm(4, filters)
        self.b = nn.Conv3d(filters, filters, 3, padding=1)
        self.skip = nn.Conv3d(channels, filters, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.elu(self.b(F.elu(self.norm(self.a(x)))) + self.skip(x))


class Hourglass(nn.Module):
    """An encoder and a decoder with a skip connection and interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(5, 12, 7, padding=3)
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(12, 20, 3, padding=1), nn.SiLU())
        self.leave = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.enter(x))
        y = F.interpolate(self.down(x), scale_factor=2.0, mode="nearest")
        return self.leave(torch.cat([x, y], 1))


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv3d(2, 8, 3, padding=1), Down(8, 16), Down(16, 24), Down(24, 40)),
        *(nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(40, 10)),
    )


def hourglass() -> nn.Module:
    torch.manual_seed(0)
    return Hourglass()


STEPS: list[tuple[Any, tuple[int, ...], dict[str, int], dict[str, Any]]] = [
    (classifier, (2, 2, 40, 48, 56), {"depth": 2}, {}),
    (classifier, (2, 2, 40, 48, 56), {"depth": 2}, {"checkpoint": "Down", "optimizer": "adam"}),
    (classifier, (4, 2, 24, 24, 24), {"sample": 2}, {"shard": "zero3", "optimizer": "adamw"}),
    (hourglass, (2, 5, 144, 240), {"height": 2}, {"accumulate": 2, "optimizer": "momentum"}),
    (hourglass, (2, 5, 144, 240), {"sample": 2}, {"shard": "zero2", "checkpoint": "down"}),
    # The memory of halves is kept for the next step, and is there while activations are.
    (classifier, (2, 2, 32, 24, 24), {"depth": 2}, {"wire": "bfloat16", "optimizer": "adam"}),
]


@pytest.mark.parallel(2)
@pytest.mark.parametrize(("make", "shape", "extents", "given"), STEPS)
def test_predicted_peaks_are_measured_ones(
    make: Any, shape: tuple[int, ...], extents: dict[str, Any], given: dict[str, Any]
) -> None:
    grid = dc.ProcessGrid(**extents, device="cpu")
    measured = grid.comm.allgather(peak_of(lambda: step_on(grid, make, shape=shape, **given)).whole)
    predicted = None
    if grid.rank == 0:
        # Its operators are run here, as kernels allocate memory that no recording shows.
        machine = dataclasses.replace(described(2), roofline=None)
        predicted = predict(make(), shape, extents, machine, **given).peak
    sleep_until_all_are_here(grid.comm)
    assert grid.comm.bcast(predicted) == pytest.approx(max(measured), rel=0.05)
