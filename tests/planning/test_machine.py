"""Machines in files, and what their tables say of bytes between ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distconv.planning.links import check_ranks, collective_cost, messages_cost
from distconv.planning.machine import LinkTimes, Machine, Table
from tests.planning.machines import described


def test_a_machine_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    machine = described()
    machine.operators = {"2": {"aten.relu.default(float32[3])": 1e-6}}
    machine.reductions = {"all_reduce within": {2: LinkTimes.described(1e-6, 1e9)}}
    machine.links["within"] = dataclasses.replace(machine.links["within"], eager=1024)
    machine.skew = Table((0.0, 1.0), (0.0, 0.1))
    machine.host["conv2d"] = Table((0.0, 1e6), (1e-5, 1e-4))
    machine.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == machine


def test_times_of_operators_in_older_files_are_taken_anew(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    machine = described()
    machine.operators["2"] = {"aten.convolution.default": 1.0}
    machine.workspaces["aten.convolution.default"] = 1
    machine.save(path)
    path.write_text(path.read_text().replace('"format": 2', '"format": 1'))
    old = Machine.load(path)
    assert old.operators == old.workspaces == {} and old.links == machine.links


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "calibrate"),
        ("{}", "'format' is missing"),
        ('{"format": 9}', "expected 2"),
        ("nonsense", "describes no machine"),
        ('{"format": 2, "memory": "16GiB"}', "its memory is '16GiB', expected the bytes"),
    ],
)
def test_a_file_that_is_no_machine_is_refused_in_words(
    tmp_path: Path, content: str | None, words: str
) -> None:
    path = tmp_path / "machine.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=words):
        Machine.load(path)


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1.0)), min_size=1, unique_by=lambda p: p[0]),
    st.floats(0, 2e6),
)
def test_a_table_meets_its_points_and_stays_between_them(
    points: list[tuple[float, float]], size: float
) -> None:
    sizes, seconds = zip(*sorted(points), strict=True)
    table = Table(sizes, seconds)
    assert [table.at(s) for s in sizes] == pytest.approx(seconds)
    if size <= sizes[-1]:
        assert min(seconds) - 1e-9 <= table.at(size) <= max(seconds) + 1e-9


def test_messages_between_nodes_take_the_links_between_nodes() -> None:
    machine = described(ranks_per_node=4)
    within = messages_cost(1, [(2, 10**6)], [(2, 10**6)], machine)
    between = messages_cost(3, [(4, 10**6)], [(4, 10**6)], machine)
    assert within.total == pytest.approx(1e-6 + 1e-4)
    assert between.total == pytest.approx(1e-5 + 1e-3)


def test_latencies_of_messages_pass_together_and_host_work_adds_up() -> None:
    machine = described(ranks_per_node=4)
    machine.links = {
        "within": LinkTimes.described(1e-5, 1e9, posted=2e-6, after=1e-6),
        "between": LinkTimes.described(1e-4, 1e9, posted=2e-6, after=1e-6),
    }
    near = [(peer, 1000) for peer in (1, 2, 3)]
    of_near = messages_cost(0, near, near, machine)
    assert of_near.total == pytest.approx(1e-5 + 3e-6 + 2 * 3e-6)
    assert of_near.posted == pytest.approx(3 * 2e-6)
    assert of_near.after == pytest.approx(3 * 1e-6)
    both = messages_cost(0, [*near, (4, 1000)], near, machine)
    assert both.total == pytest.approx(1e-4 + 1e-6 + 3 * 3e-6)
    assert messages_cost(0, [], [], machine).total == 0.0


def test_a_machine_of_one_node_says_that_it_has_no_links_between_nodes() -> None:
    machine = dataclasses.replace(described(), links={"within": LinkTimes.described(1e-6, 1e9)})
    with pytest.raises(ValueError, match="on two nodes where there are several"):
        messages_cost(3, [(4, 8)], [(4, 8)], machine)
    check_ranks(machine, 4)
    with pytest.raises(ValueError, match="than the 4 of a node"):
        check_ranks(machine, 5)


def test_messages_beyond_the_eager_ones_wait_for_both_sides() -> None:
    machine = described()
    machine.links["within"] = dataclasses.replace(machine.links["within"], eager=1024)
    assert not messages_cost(0, [(1, 1024)], [(1, 8)], machine).both
    assert messages_cost(0, [(1, 8)], [(1, 1025)], machine).both
    assert collective_cost("all_reduce", range(2), 2048, machine).both
    assert not messages_cost(0, [(4, 10**9)], [], machine).both


def test_a_measured_reduction_counts_as_measured_and_more_ranks_take_longer() -> None:
    machine = described(ranks_per_node=64)
    machine.reductions = {"all_reduce within": {4: LinkTimes.described(1e-6, 1e9)}}
    assert collective_cost("all_reduce", range(4), 10**6, machine).total == pytest.approx(1.001e-3)
    times = [collective_cost("all_reduce", range(n), 10**6, machine).total for n in (2, 4, 8, 64)]
    assert times == sorted(times)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
def test_described_collectives_grow_with_ranks_bytes_and_nodes(kind: str) -> None:
    machine = described(ranks_per_node=4)
    for ranks in (range(2), range(4), range(64)):
        costs = [collective_cost(kind, ranks, size, machine).total for size in (8, 10**4, 10**7)]
        assert costs == sorted(costs)
    within = collective_cost(kind, range(4), 10**6, machine).total
    apart = collective_cost(kind, range(0, 16, 4), 10**6, machine).total
    assert within < apart


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1e-6])
def test_times_that_are_none_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds from 0"):
        Table((0.0, 1.0), (0.0, seconds))
    with pytest.raises(ValueError, match="have to grow"):
        Table((1.0, 1.0), (0.0, 0.0))
