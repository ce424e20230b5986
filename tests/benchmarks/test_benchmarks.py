"""Benchmarks run, pair like with like, and count what they say; nothing here looks at times."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.profiler import ProfilerActivity, profile

import distconv as dc
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.attention import attentions
from benchmarks.families import families
from benchmarks.family_cases import FAMILIES
from benchmarks.halo import exchange, halos, plan_of, sendrecv
from benchmarks.layer import Case, layers
from benchmarks.lookups import graphs, warps
from benchmarks.measuring.memory import peak_of
from benchmarks.measuring.network import Network, cut_sample, sgd_step
from benchmarks.measuring.own_step import (
    OVER_DEFAULT,
    OVER_PLAIN,
    PARTS,
    own_step,
    silenced,
    with_fixed_statistics,
)
from benchmarks.measuring.plain import ONEDNN, best, plain_forms
from benchmarks.measuring.report import Row, as_table, minus, over, plot, speedup
from benchmarks.measuring.settings import Settings
from benchmarks.measuring.turns import alternate
from benchmarks.modes import modes
from benchmarks.networks import NETWORKS
from benchmarks.overhead import cut_convolution, kernels, overheads
from benchmarks.record import record
from distconv.planning.scaling import Contender
from tests.support.everywhere import ended_with_one_line, on_rank_zero

QUICK = Settings(seconds=0.0)


def tiny(network: Network) -> Network:
    """Return a network of the benchmarks for a sample that takes no time."""
    planes = len(network.shape) == 4
    return network._replace(shape=(*network.shape[:2], *((32, 32) if planes else (16, 16, 16))))


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch) -> None:
    """Let a benchmark take two measurements of one call each."""
    monkeypatch.setattr("benchmarks.measuring.turns.ROUNDS", (2, 2))
    monkeypatch.setattr("benchmarks.measuring.turns.SHORTEST", 0.0)
    monkeypatch.setattr("benchmarks.measuring.turns.ceil", lambda x: 1)


@pytest.fixture(autouse=True)
def seeds_of_fresh_processes() -> None:
    """Let every rank draw numbers of its own, as in a program that seeds nothing."""
    torch.manual_seed(MPI.COMM_WORLD.rank)


def check(rows: list[Row], benchmark: str) -> None:
    """Assert that rows are complete, the same on every rank, and can be shown."""
    assert rows and {row.benchmark for row in rows} == {benchmark}
    for row in rows:
        assert row.case and row.configuration and row.measure
        assert row.low <= row.value <= row.high and row.subject > 0
        assert json.loads(row.json())["value"] == row.value
    shown = as_table(rows).splitlines()
    assert len(shown) == len(rows) + 1 and shown[0].startswith("case")


@pytest.mark.parallel(2)
def test_layers_are_told_over_all_bounds_with_their_shapes() -> None:
    case = Case("tiny", lambda: nn.Conv2d(2, 3, 3, padding=1), (1, 2, 8, 6), 1.03, 1.3)
    rows = list(layers(QUICK, [case]))
    check(rows, "layer")
    assert [(row.measure, row.target, row.at_least) for row in rows] == [
        (OVER_PLAIN, 1.03, False),
        (OVER_DEFAULT, None, False),
        ("speed-up over the best serial torch, 2 threads", 1.3, True),
    ]
    assert rows[0].configuration == "height=2, 1 thread a rank, 1x2x8x6, 1x2x4x6 on rank 0"
    assert MPI.COMM_WORLD.bcast(rows) == rows


def test_the_forms_of_plain_torch_compute_the_same() -> None:
    x = torch.randn(2, 3, 6, 5, 4)
    results = {}

    def keep(module: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Callable[[], None]:
        x.requires_grad_()
        y = module(x)
        y.backward(dy)
        tensors = y.detach(), x.grad, *(p.grad for p in module.parameters())
        results[len(results)] = [t.contiguous() for t in tensors if t is not None]
        return lambda: None

    def make() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Conv3d(3, 7, 3, padding=1), nn.AvgPool3d(2, ceil_mode=True))

    forms = plain_forms(make, (x, torch.randn(make()(x).shape)), keep)
    assert list(forms) == ["torch by default", "channels last", ONEDNN]
    for form in (1, 2):
        torch.testing.assert_close(results[form], results[0], rtol=1e-4, atol=1e-5)
    assert best([[3.0, 9.0, 3.0], [2.0, 4.0, 5.0]]) == [3.0, 9.0, 3.0]


@pytest.mark.parallel(2)
def test_a_layer_that_makes_another_block_without_communication_is_no_bound() -> None:
    case = Case("valid", lambda: nn.Conv2d(2, 3, 3), (1, 2, 8, 6))
    with pytest.raises(ValueError, match="a rank makes 1x3x2x4, .* 1x3x3x4"):
        list(layers(QUICK, [case]))


@pytest.mark.parallel(2)
@pytest.mark.parametrize("axis", ["height", "width"])
def test_halos_are_the_bytes_that_sendrecv_moves(axis: str, monkeypatch) -> None:
    check(list(halos(QUICK, [(axis, 2, 16)])), "halo")
    grid = dc.ProcessGrid(**{axis: -1})
    x = dc.distribute_tensor(torch.ones(1, 2, 16, 16), grid)
    plan = plan_of(x)
    assert [route.size for route in plan.sends] == [2 * 16]
    assert [route.size for route in plan.receives] == [2 * 16]
    exchange(x, plan)()
    sendrecv(plan, grid)()


@pytest.mark.parallel(2)
@pytest.mark.parametrize("network", [*map(tiny, NETWORKS)], ids=lambda network: network.name)
def test_a_network_without_communication_makes_blocks_of_the_same_shape(network) -> None:
    grid = QUICK.grid(len(network.shape))
    module = dc.parallelize(network.make(network.shape[2:]), grid)
    x, y = cut_sample(network, grid)
    dc.redistributions(reset=True)
    outputs = module(x)
    local = network.make(x.shard.shape[2:])(x.to_local())
    assert outputs.shard.shape == local.shape
    network.loss(outputs, y).backward()
    assert {moved.operator for moved in dc.redistributions(reset=True)} <= {"flatten"}


@pytest.mark.parallel(2)
def test_the_loss_of_a_step_is_the_sum_of_its_parts() -> None:
    rows = list(own_step(QUICK, tiny(NETWORKS[0])))
    check([row for row in rows if row.benchmark != "memory"], "own")
    total, by_default, *rest = rows
    assert (total.measure, by_default.measure) == (OVER_PLAIN, OVER_DEFAULT)
    taken, others = rest[: len(PARTS)], rest[len(PARTS) :]
    assert tuple(row.measure for row in taken) == PARTS
    assert taken[0].subject == total.subject and taken[-1].bound == total.bound
    assert all(a.bound == b.subject for a, b in pairwise(taken)), "each goes on from the last"
    assert [row.measure.split()[0] for row in others] == ["compiled", "speed-up", "peak", "the"]


OWN = """
from torch import nn

def planes():
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())

def flat():
    return nn.Sequential(nn.Flatten(), nn.Linear(2 * 16 * 16, 4))

class Pair(nn.Conv2d):
    def __init__(self):
        super().__init__(2, 3, 1)

    def forward(self, x):
        return x, super().forward(x)
"""


@pytest.fixture
def own(folder: Path, own_modules: None) -> Path:
    path = folder / "net.py"
    on_rank_zero(lambda: path.write_text(OWN))
    return path


@pytest.mark.parallel(2)
def test_the_step_of_a_users_network_is_taken_apart(own: Path, capsys) -> None:
    main(["own", f"{own}:planes", "1,2,16,16", "--json", "--seconds", "0"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert bool(rows) is (MPI.COMM_WORLD.rank == 0)
    for row in rows:
        assert row["case"] == f"{own}:planes"
        assert "1x2x16x16" in row["configuration"] and row["rounds"]


@pytest.mark.parallel(2)
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("{own}:flat 1,2,16,16", "on rank 0: an input of 1x2x8x16 raises"),
        ("{own}:planes 1,3,16,16", "an input of 1x3x16x16 raises"),
        ("{own}:Pair 1,2,16,16", "it returns tuple"),
        ("{own}:planes 4,2", "no spatial dimension to cut; give a --grid"),
        ("{own}:planes", "the following arguments are required: N,C,..."),
        ("{own}:planes 1,2,16,16 --grid height=3", "--grid: "),
    ],
)
def test_a_network_that_cannot_be_measured_is_told_on_every_rank(
    options: str, told: str, own: Path, capsys
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["own", *options.format(own=own).split()])
    assert end.value.code == 2
    said = MPI.COMM_WORLD.bcast(capsys.readouterr().err)
    assert told in " ".join(said.split())


@pytest.mark.parallel(2)
@pytest.mark.parametrize("collectives", [False, True])
def test_a_silent_step_sends_nothing_and_changes_nothing(
    collectives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = NETWORKS[0]._replace(shape=(1, 3, 16, 16))
    grid = QUICK.grid(4)
    model = dc.parallelize(with_fixed_statistics(network), grid)
    step = sgd_step(network, model, *cut_sample(network, grid), rate=0.0)
    step()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    carrier = type(grid.transport.carrier)
    sent: Counter[str] = Counter()
    for name in ("exchange", "all_reduce", "all_gather"):
        whole = getattr(carrier, name)
        monkeypatch.setattr(
            carrier, name, lambda *a, name=name, whole=whole: (sent.update([name]), whole(*a))[1]
        )
    silenced(step, collectives)()
    assert not sent["exchange"]
    assert bool(sent["all_reduce"]) is bool(sent["all_gather"]) is not collectives
    step()
    assert sent["exchange"]
    for name, value in model.state_dict().items():
        assert name.endswith("num_batches_tracked") or torch.equal(value, state[name])


@pytest.mark.parallel(2)
def test_a_peak_is_counted_to_the_byte_beside_the_threads_of_gloo() -> None:
    grid = dc.ProcessGrid(height=-1, transport="torch")
    group = grid.communicator(["height"])

    def make() -> Callable[[], None]:
        kept = torch.ones(1000)

        def step() -> None:
            for _ in range(20):
                doubled = kept * 2
                grid.transport.all_reduce(doubled, group).wait()
                del doubled
            _ = torch.cat([kept, kept, kept])

        return step

    peak = peak_of(make)
    assert peak.step == 12000 and peak.whole == 16000


@pytest.mark.parallel(2)
def test_attention_is_compared_with_a_gather_of_its_keys() -> None:
    rows = list(attentions(QUICK, ((2, 8, 8, False), (3, 8, 16, True))))
    check(rows, "attention")
    assert sum("all-to-all" in row.measure for row in rows) == 2  # three heads do not divide


@pytest.mark.parallel(2)
def test_warps_and_graphs_are_compared_with_gathering() -> None:
    check(list(warps(QUICK, ((1, (8, 8)), (2, (4, 4, 4))))), "warp")
    rows = list(graphs(QUICK, ((128, 2),)))
    check(rows, "graph")
    assert sum("new indices" in row.measure for row in rows) == 2


@pytest.mark.parallel(2)
def test_partial_transforms_are_compared_with_transforms_in_full() -> None:
    check(list(modes(QUICK, ((8, 2),))), "modes")


@pytest.mark.parallel(2)
def test_families_are_counted_in_bytes_and_memory() -> None:
    rows = list(families(QUICK, FAMILIES[:1]))
    check(rows, "families")
    forward, backward, peak = (row.value for row in rows)
    assert 2 < forward < 4 and 2 < backward < 4 and 0.45 < peak < 0.6


@pytest.mark.parallel(2)
def test_overheads_compare_the_same_kernels_on_the_same_shapes() -> None:
    check(list(overheads(QUICK)), "overhead")
    grid = dc.ProcessGrid(height=-1)
    x = dc.distribute_tensor(torch.randn(1, 8, 16, 16), grid).requires_grad_()
    weight, dy = torch.randn(8, 8, 3, 3, requires_grad=True), torch.randn(x.shard.shape)
    with dc.method("overlapped"):
        subject = _convolutions(cut_convolution(x, weight, dy))
    direct = kernels(x, weight.detach(), dy, sendrecv(plan_of(x), grid))
    assert subject == _convolutions(direct)
    assert subject.total() == 4


def _convolutions(run: Callable[[], object]) -> Counter[str]:
    """Count the convolutions of a call, forward and backward, by the shapes of their operands."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as record:
        run()
    names = "aten::_convolution", "aten::convolution_backward"
    # Of a bias there is only the shape of its gradient.
    return Counter(f"{e.name} {e.input_shapes[:3]}" for e in record.events() if e.name in names)


@pytest.mark.parallel([1, 2])
def test_sides_take_turns_and_one_may_be_rank_0_alone() -> None:
    comm = MPI.COMM_WORLD
    calls: list[str] = []
    sides = (
        Contender(lambda: calls.append(f"a{torch.get_num_threads()}"), threads=2),
        Contender(lambda: calls.append("b"), ranks=1),
    )
    times = alternate(comm, sides, 0.0)
    assert [len(t) for t in times] == [2, 2] and comm.bcast(times) == times
    assert torch.get_num_threads() == 1
    turns = ["a2", "a2", "b", "b", "a2", "b", "a2", "b", "b", "a2"]
    assert calls == (turns if comm.rank == 0 else [t for t in turns if t != "b"])


def test_a_side_is_repeated_by_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"message": 0.002, "copy": 0.00001, "step": 1.0}
    asked: list[tuple[str, int]] = []

    def timed(comm: Any, side: Any, repeats: int) -> float:
        asked.append((side.run(), repeats))
        return seconds[side.run()]

    monkeypatch.setattr("benchmarks.measuring.turns.timed", timed)
    monkeypatch.setattr("distconv.planning.scaling.timed", timed)
    monkeypatch.setattr("benchmarks.measuring.turns.SHORTEST", 0.01)
    monkeypatch.setattr("benchmarks.measuring.turns.ceil", math.ceil)
    alternate(MPI.COMM_SELF, [Contender(lambda name=name: name) for name in seconds], 0.0)
    assert set(asked[6:]) == {("message", 5), ("copy", 1000), ("step", 1)}


def test_targets_are_met_or_missed_by_how_much(tmp_path: Path) -> None:
    row = "layer", "case", "configuration"
    slow, fast = [2.2, 2.2, 2.2], [2.0, 2.0, 2.0]
    rows = [
        over(row, "over", slow, fast, 1.0),
        over(row, "over", slow, fast, 1.2),
        speedup(row, "speed-up", slow, fast, 1.0),
        minus(row, "minus", slow, fast, None),
    ]
    assert [r.verdict for r in rows] == ["missed by 10.0%", "met", "missed by 9.1%", ""]
    assert rows[3].unit == "us" and round(rows[3].value) == 200000
    plot(rows, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").stat().st_size > 1000


def test_the_command_prints_a_line_of_json_for_every_row(monkeypatch, capsys) -> None:
    case = Case("tiny", lambda: nn.Conv2d(2, 3, 3, padding=1), (1, 2, 8, 6))
    monkeypatch.setitem(BENCHMARKS, "layer", lambda settings: layers(settings, [case]))
    main(["layer", "--json", "--seconds", "0"])
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["case"] for line in lines] == ["tiny"] * 3


@pytest.mark.parallel(2)
def test_results_are_recorded_with_the_versions_they_hold_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        "benchmarks.record.BENCHMARKS", {"halo": lambda s: halos(s, [("height", 2, 16)])}
    )
    path = MPI.COMM_WORLD.bcast(tmp_path / "results" / "cpu.md")
    record(path, QUICK, ["halo"])
    MPI.COMM_WORLD.barrier()
    text = path.read_text()
    assert "## halo" in text and "128 B each way, height cut" in text
    assert f"torch     {torch.__version__}" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["halo"], "one rank has no halos"), (["layer", "--grid", "height=2"], "--grid: ")],
)
def test_halos_of_one_rank_and_grids_that_do_not_fit_are_refused(
    arguments: list[str], message: str, capsys
) -> None:
    ended_with_one_line(lambda: main(arguments), message, capsys)
