"""Machines in files, and what their tables say of bytes between ranks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distconv.planning.machine import DESCRIBED, LinkTimes, Machine, Table
from distconv.planning.timeline import check_ranks, collective_cost, messages_cost
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


def test_a_folder_does_not_hide_a_described_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "frontier").mkdir()
    monkeypatch.chdir(tmp_path)
    assert Machine.load("frontier") == Machine.load(DESCRIBED / "frontier.json")


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
        ("{}", "format is None, expected 2"),
        ('{"format": 9}', "expected 2"),
        ("[2]", r"it is \[2\], expected an object"),
        ("nonsense", "describes no machine"),
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


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("name", 7, "name is 7, expected text"),
        ("assumed", "yes", "assumed is 'yes', expected true or false"),
        ("ranks_per_node", "4", "ranks_per_node is '4', expected a whole number above 0"),
        ("ranks_per_node", 0, "ranks_per_node is 0, expected a whole number above 0"),
        ("threads", 1.5, "threads is 1.5, expected a whole number above 0"),
        ("memory", "16GiB", "memory is '16GiB', expected a whole number above 0"),
        ("links", [], r"links is \[\], expected an object"),
        ("links.within", 1e9, "links.within is 1000000000.0, expected an object"),
        ("links.within", {"latency": 1e-6}, "links.within.bandwidth is missing"),
        ("links.within", {}, "links.within.total is missing"),
        (
            "links.within",
            {"latency": 1e-6, "bandwidth": "25 GB/s"},
            "links.within.bandwidth is '25 GB/s', expected a number above 0",
        ),
        ("links.within.total.sizes", 8, "links.within.total.sizes is 8, expected a list"),
        ("links.within.total.seconds", [1, None], "seconds.1 is None, expected a number from 0"),
        ("links.within.total", {"sizes": [1], "seconds": []}, "links.within.total: a table has 1"),
        (
            "reductions",
            {"all_reduce within": {"two": 1}},
            "within has the entries .* expected numbers of ranks",
        ),
        ("packing", None, "packing is None, expected an object of sizes, seconds"),
        ("host.conv2d", "1e-5", "host.conv2d is '1e-5', expected an object"),
        ("roofline", {"flops": {}}, "roofline.bandwidth is missing"),
        (
            "roofline",
            {"flops": {"float32": 0}, "bandwidth": 1e9, "efficiency": {"": 1}, "smallest": 0},
            "roofline.flops.float32 is 0, expected a number above 0",
        ),
        ("operators", {"2": {"relu": "fast"}}, "operators.2.relu is 'fast', expected a number"),
        ("workspaces", {"relu": -1}, "workspaces.relu is -1, expected a whole number from 0"),
        ("environment", {"OMP": 1}, "environment.OMP is 1, expected text"),
        ("enviroment", {}, "enviroment is unknown, expected name, assumed"),
        ("launch", {"scheduler": "slurm", "option": []}, "launch.option is unknown, expected sch"),
        ("launch", {"scheduler": "slurm", "setup": "module"}, "launch.setup is 'module', expected"),
        ("sources", "the vendor", "sources is 'the vendor', expected an object"),
    ],
)
def test_a_wrong_value_in_a_file_is_named_with_its_key_and_what_it_should_be(
    tmp_path: Path, key: str, value: object, words: str
) -> None:
    path = tmp_path / "machine.json"
    described().save(path)
    content = json.loads(path.read_text())
    *outer, last = key.split(".")
    section = content
    for name in outer:
        section = section[name]
    section[last] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"machine.json' describes no machine: .*{words}"):
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
    with pytest.raises(ValueError, match="on two nodes if the cluster has several"):
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
    with pytest.raises(ValueError, match="seconds of 0 or more"):
        Table((0.0, 1.0), (0.0, seconds))
    with pytest.raises(ValueError, match="expected ascending sizes"):
        Table((1.0, 1.0), (0.0, 0.0))
