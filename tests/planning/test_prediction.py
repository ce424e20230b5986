"""The step that is predicted is the one that the code would take, and its parts add up."""

from __future__ import annotations

import dataclasses
import subprocess
import time
from typing import Any

import pytest
from torch import Tensor, nn

from distconv.planning import plan, predict
from distconv.planning.machine import Table
from distconv.planning.operators import OperatorTimes, wait_for_all
from distconv.planning.prediction import record_ranks
from distconv.planning.timeline import play
from tests.planning.machines import described

SHAPE = (4, 3, 16, 16)


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 4, 3, padding=1),
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_seconds_of_the_layers_add_up_to_the_step(asynchronous: bool) -> None:
    for grid in ({}, {"height": 2}, {"sample": 2, "width": 2}, {"height": 8}):
        p = predict(network(), SHAPE, grid, described(asynchronous=asynchronous))
        assert sum(layer.seconds for layer in p.layers) == pytest.approx(p.seconds)
        assert sum(s.stop - s.start for s in p.critical_path) == pytest.approx(p.seconds)
        assert p.compute + p.host + p.exposed == pytest.approx(p.seconds)


def test_a_slower_link_is_seen_as_exposed_communication_alone() -> None:
    fast, slow = described(ranks_per_node=4), described(ranks_per_node=1)
    one, other = (predict(network(), SHAPE, {"height": 2}, m) for m in (fast, slow))
    assert other.exposed > one.exposed
    assert other.compute == pytest.approx(one.compute)


def test_the_slowest_rank_of_uneven_blocks_decides() -> None:
    module = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1))
    whole = (1, 3, 9, 512)
    p = predict(module, whole, {"height": 2}, described())
    assert p.rank == 0
    waiting = [s for s in p.critical_path if s.what == "wait"]
    assert not waiting


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_that_are_played_wait_for_each_other(asynchronous: bool) -> None:
    machine = described(asynchronous=asynchronous)
    recordings = record_ranks(network(), [SHAPE], {"height": 3})
    times = OperatorTimes(machine, 3)
    line = play(recordings, machine, times)
    alone = [play([r], machine, times).seconds for r in recordings]
    assert line.seconds >= max(alone) - 1e-12


def test_messages_that_move_only_while_both_sides_wait_hide_behind_nothing_of_the_other_rank() -> (
    None
):
    module, whole = nn.Conv2d(64, 64, 3, padding=1), (1, 64, 9, 512)
    waits = {}
    for eager in (None, 0):
        machine = described()
        machine.links["within"] = dataclasses.replace(machine.links["within"], eager=eager)
        recordings = record_ranks(module, [whole], {"height": 2})
        line = play(recordings, machine, OperatorTimes(machine, 2))
        waits[eager] = sum(
            s.stop - s.start
            for s in line.segments[1]
            if s.what in ("wait", "communication") and s.place.layer == "Conv2d"
        )
    # Rank 0 has one row more, and comes later to its wait.
    assert waits[0] > 1.5 * waits[None]


@pytest.mark.parametrize("eager", [None, 0])
def test_messages_are_hidden_from_their_start_until_they_are_waited_for_as_in_a_timeline(
    eager: int | None,
) -> None:
    machine = described()
    machine.links["within"] = dataclasses.replace(machine.links["within"], eager=eager)
    p = predict(nn.Conv2d(64, 64, 3, padding=1), (1, 64, 64, 64), {"height": 2}, machine)
    (layer,) = (x for x in p.layers if x.name == "Conv2d")
    # The convolution of the block runs while its halos are under way; those of the sides follow.
    assert 0.8 * layer.forward <= layer.hidden <= layer.forward


@pytest.mark.parametrize(
    "results", [dict, dataclasses.make_dataclass("Results", ["one", "other", "largest"])]
)
def test_all_results_of_a_network_have_a_loss_and_nothing_warns(
    results: Any, recwarn: pytest.WarningsRecorder
) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.unused = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 1)
            self.one, self.other = nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Any:
            y = self.body(x)
            return results(one=self.one(y), other=self.other(y), largest=y.argmax(1))

    def first_result(y: Any) -> Tensor:
        one: Tensor = (y if isinstance(y, dict) else vars(y))["one"]
        return one.sum()

    for loss in ("mse", "cross-entropy"):
        p = predict(Heads(), SHAPE, {"height": 2}, described(), loss=loss)
        one, other = ([x for x in p.layers if x.name == name][0] for name in ("one", "other"))
        assert min(one.backward, other.backward) > max(one.forward, other.forward)
    assert plan(Heads(), SHAPE, 2, described()).grid
    first = predict(Heads(), SHAPE, {"height": 2}, described(), loss=first_result)
    assert not [x for x in first.layers if x.name == "other"][0].backward
    assert not recwarn.list


def test_ranks_wait_for_the_slower_ones_of_those_that_do_the_same() -> None:
    even, uneven = described(), described()
    uneven.skew = Table((0.0, 1.0), (0.0, 0.1))
    one, other = (predict(network(), SHAPE, {"height": 2}, m) for m in (even, uneven))
    assert one.seconds < other.seconds <= 1.1 * one.seconds
    assert (
        predict(network(), SHAPE, {}, even).seconds == predict(network(), SHAPE, {}, uneven).seconds
    )


def test_python_takes_longer_behind_operators_that_empty_the_caches() -> None:
    warm, cold = described(), described()
    cold.host = {"*": Table((0.0, 1e3), (1e-6, 1e-5))}
    small, large = (4, 3, 2, 2), (4, 3, 64, 64)
    assert predict(network(), large, {}, cold).host > 5 * predict(network(), large, {}, warm).host
    assert predict(network(), large, {}, cold).host > predict(network(), small, {}, cold).host


def test_a_parallelized_module_and_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="is not a shape"):
        predict(network(), (1, -3), {}, described())
    module = network()
    module.__dict__["_distconv_gradient_reduction"] = None
    with pytest.raises(ValueError, match="parallelized"):
        predict(module, SHAPE, {}, described())


def test_a_timing_process_that_is_killed_ends_the_wait_for_those_that_wait_for_it() -> None:
    waiting = subprocess.Popen(["sleep", "60"], stderr=subprocess.PIPE)
    killed = subprocess.Popen(["sh", "-c", "kill -9 $$"], stderr=subprocess.PIPE)
    begun = time.monotonic()
    try:
        with pytest.raises(RuntimeError, match="ended with status -9"):
            wait_for_all([waiting, killed])
    finally:
        waiting.kill()
        waiting.wait()
    assert time.monotonic() - begun < 30
