"""Described machines, published experiments, and contention: what the benchmarks compute."""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from benchmarks.contention import Event, Step, Trace, all_gather, all_reduce, recorded, section
from benchmarks.scale import ASSUMPTIONS, Experiment, outcome, page, picture
from distconv.geometry.topology import Topology
from distconv.planning import Machine
from distconv.planning.machine import DESCRIBED
from distconv.planning.timeline import collective_cost, messages_cost
from tests.planning.machines import described

MACHINES = sorted(DESCRIBED.glob("*.json"))


@pytest.mark.parametrize("path", MACHINES, ids=lambda path: path.stem)
def test_described_machines_give_the_source_of_every_number(path: Path) -> None:
    machine = Machine.load(path)
    assert machine.assumed and machine.roofline is not None and machine.memory
    parts = ["ranks_per_node", "memory", "links within", "links between", "host"]
    parts += [f"roofline {part}" for part in ("flops", "bandwidth", "efficiency", "smallest")]
    assert all(machine.sources[part] for part in parts)
    assert machine.links["within"].total.at(2**24) < machine.links["between"].total.at(2**24)


def experiment(measure: str = "speed-up") -> Experiment:
    """A small one, on 2 to 8 ranks."""
    grids = ({"height": 2}, {"height": 4}, {"height": 8})
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
    return Experiment(
        "small",
        "small",
        lambda: nn.Sequential(*layers),
        (1, 3, 512, 512),
        grids,
        "GPUs a sample",
        measure,
        {2: 1.0},
        "nobody",
    )


def test_an_experiment_starts_at_one_and_stays_within_its_bands(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    machine = described(asynchronous=True)
    found = outcome(experiment(), machine)
    assert found.places == [2, 4, 8] and found.values[0] == 1.0
    assert 1 < found.values[1] < 2 and found.values[1] < found.values[2] < 4
    assert set(found.bands) == {number.name for number in ASSUMPTIONS}
    slow, fast = (band[-1] for band in found.bands["bandwidth between nodes"])
    assert slow < fast  # a faster network, a larger speed-up
    picture(found, tmp_path / "small.png")
    assert (tmp_path / "small.png").stat().st_size > 10000
    text = page(machine, found)
    assert "| 8 | 8 |" in text and text.count("\n| bandwidth") == 2


def test_each_assumed_number_changes_the_machine_where_it_says() -> None:
    machine = described()
    for number in ASSUMPTIONS:
        least, most = number.changed(machine, number.low), number.changed(machine, number.high)
        assert least != most and number.changed(machine, number.low) == least, number.name


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8]), st.integers(1, 4))
def test_an_all_reduce_brings_every_rank_the_sum(
    inside: int, nodes: int, per_node_more: int
) -> None:
    per_node = inside * per_node_more
    group = [node * per_node + i for node in range(nodes) for i in range(inside)]
    steps = all_reduce(group, 1024.0, per_node)
    # Contributions that each rank has heard of; at each step messages cross.
    heard = {rank: {rank} for rank in group}
    for step in steps:
        before = {rank: set(known) for rank, known in heard.items()}
        for a, b, size in step:
            assert size >= 1024 / len(group) and a != b
            heard[b] |= before[a]
    assert all(known == set(group) for known in heard.values())
    sent = sum(size for step in steps for a, _, size in step if a == group[0])
    expected = 2 * 1024 * ((inside - 1) / inside + (nodes - 1) / nodes / inside)
    assert sent == pytest.approx(expected)


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8]))
def test_an_all_gather_brings_every_rank_what_each_has(inside: int, nodes: int) -> None:
    group = list(range(inside * nodes))
    has = {rank: {rank} for rank in group}
    for step in all_gather(group, 8.0, inside):
        before = {rank: set(known) for rank, known in has.items()}
        for a, b, size in step:
            assert size == 8 * len(before[a] - before[b])
            has[b] |= before[a]
    assert all(known == set(group) for known in has.values())


def test_ranks_that_cannot_be_halved_are_refused() -> None:
    with pytest.raises(ValueError, match="3 ranks are no power of two"):
        all_reduce([0, 1, 2], 8.0, 4)


def trace() -> Trace:
    """The trace of two samples, each on two ranks of a node: halos twice, then a sum over all."""
    others = [(1, 0, 0, 0, 0, 0), (0, 0, 0, 0, 1, 0), (1, 0, 0, 0, 1, 0)]
    starts = []
    for direction in (1, -1):
        halo = (((0, 0, 0, 0, direction, 0), 1000),)
        total = tuple((by, 4096) for by in others)
        exchange = Event(None, halo, halo)
        starts.append({0: exchange, 1: exchange, 2: Event("all_reduce", total, total)})
    return Trace("Net", Topology((2, 1, 1, 1, 2, 1)), [0, 1, 0, 1], starts)


def test_a_step_is_recorded_once_for_each_kind_of_place() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU())
    found = recorded(module, (2, 1, 16, 16), {"sample": 2, "height": 4})
    # Kinds are in the order of ranks: first, middle, last.
    assert found.kinds == [0, 1, 1, 2] * 2 and len(found.starts) == 3
    first = next(event for event in found.starts[1].values() if event.collective is None)
    assert first.arriving == tuple(((0, 0, 0, 0, d, 0), 4 * 16) for d in (-1, 1))
    assert any(
        event.collective == "all_reduce" and len(event.arriving) == 7
        for event in found.starts[0].values()
    )


def test_a_trace_becomes_the_messages_of_all_ranks() -> None:
    machine = described(ranks_per_node=2)
    halos, total = trace().movements(machine)
    (step,) = halos.steps
    assert halos.times == 2 and sorted(step) == [(a, a ^ 1, 1000) for a in range(4)]
    assert halos.planned == messages_cost(0, [(1, 1000)], [(1, 1000)], machine).total
    assert total.times == 1
    assert total.planned == collective_cost("all_reduce", range(4), 4096, machine).total
    ends: dict[int, int] = defaultdict(int)
    merged: Step = [message for step in total.steps for message in step]
    for _, to, _ in merged:
        ends[to] += 1
    assert dict(ends) == {0: 4, 1: 4, 2: 4, 3: 4}


def has_simgrid() -> bool:
    """Whether the other Python has SimGrid."""
    python = os.environ.get("PYTHON_WITH_SIMGRID", "/usr/bin/python3")
    try:
        return subprocess.run([python, "-c", "import simgrid"], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not has_simgrid(), reason="the system's Python has no SimGrid")
def test_simgrid_takes_for_lone_messages_what_the_planner_does() -> None:
    text = section(trace(), described(ranks_per_node=2))
    (halos,) = (line for line in text.splitlines() if "halos" in line)
    assert halos.endswith("| 1.00 |") and "among 4" in text
