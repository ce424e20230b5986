"""Benchmarks run, pair like with like, and count what they say; nothing here looks at times."""

from __future__ import annotations

import json
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
from benchmarks import sending_early
from benchmarks.handwritten import ByHand, handwritten, step_by_hand
from benchmarks.operators import operators
from benchmarks.record import record
from distconv.layers import Conv2d
from distconv.planning.alternation import Contender, alternate
from distconv.tools.bench import BENCHMARKS, OF_NETWORKS, Row, Settings, as_table, plot
from distconv.tools.bench.channels import Case as ChannelCase
from distconv.tools.bench.channels import channels
from distconv.tools.bench.halo import exchange, halos, plan_of, sendrecv
from distconv.tools.bench.layer import Case, layers
from distconv.tools.bench.loss import CASES, PARTS, losses, made, silenced, unchanging_step
from distconv.tools.bench.memory import memory, peak_of
from distconv.tools.bench.memory_format import memory_formats
from distconv.tools.bench.model import cut_sample, models
from distconv.tools.bench.networks import NETWORKS, Network
from distconv.tools.bench.overhead import cut_convolution, kernels, overheads
from distconv.tools.bench.report import minus, over, speedup
from distconv.tools.command_line import main
from tests.support.everywhere import on_rank_zero

QUICK = Settings(seconds=0.0)
TINY: tuple[Network, ...] = tuple(
    network._replace(shape=(*network.shape[:2], *((32,) if len(network.shape) == 4 else (16,)) * n))
    for network in NETWORKS
    for n in (len(network.shape) - 2,)
)


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch) -> None:
    """Let a benchmark take two measurements of one call each."""
    monkeypatch.setattr("distconv.planning.alternation.ROUNDS", (2, 2))
    monkeypatch.setattr("distconv.planning.alternation.SHORTEST", 0.0)
    monkeypatch.setattr("distconv.planning.alternation.ceil", lambda x: 1)


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
def test_layers_are_told_over_both_bounds_with_their_shapes() -> None:
    case = Case("tiny", lambda: nn.Conv2d(2, 3, 3, padding=1), (1, 2, 8, 6), 1.03, 1.3)
    rows = list(layers(QUICK, [case]))
    check(rows, "layer")
    assert [row.measure for row in rows] == [
        "over no communication",
        "speed-up over serial torch, 2 threads",
    ]
    assert [(row.target, row.at_least) for row in rows] == [(1.03, False), (1.3, True)]
    assert rows[0].configuration == ("height=2, 1 thread a rank, 1x2x8x6, 1x2x4x6 on rank 0")
    assert MPI.COMM_WORLD.bcast(rows) == rows


@pytest.mark.parallel(2)
def test_a_layer_that_makes_another_block_without_communication_is_no_bound() -> None:
    case = Case("valid", lambda: nn.Conv2d(2, 3, 3), (1, 2, 8, 6))
    with pytest.raises(ValueError, match="a rank makes 1x3x2x4, .* 1x3x3x4"):
        list(layers(QUICK, [case]))


@pytest.mark.parallel([2, 4])
def test_algorithms_for_channels_are_told_beside_the_cut_of_rows() -> None:
    def make(algorithm: str) -> nn.Module:
        return Conv2d(4, 8, 3, padding=1, bias=False, parallel=algorithm)

    rows = list(channels(QUICK, [ChannelCase("tiny", make, (2, 4, 8, 6))]))
    check(rows, "channels")
    algorithms = "xy" if MPI.COMM_WORLD.size == 2 else "xyw"
    assert [row.case for row in rows[::2]] == [f"tiny, stationary-{a}" for a in algorithms]
    assert {row.measure for row in rows[::2]} == {"over rows cut"}


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
@pytest.mark.parametrize("network", TINY, ids=lambda network: network.name)
def test_a_network_without_communication_makes_blocks_of_the_same_shape(network) -> None:
    grid = QUICK.grid(len(network.shape))
    module = dc.parallelize(network.make(network.shape[2:]), grid)
    x, y = cut_sample(network, grid)
    dc.redistributions(reset=True)
    made = module(x)
    local = network.make(x.shard.shape[2:])(x.to_local())
    assert made.shard.shape == local.shape
    network.loss(made, y).backward()
    assert {moved.operator for moved in dc.redistributions(reset=True)} <= {"flatten"}


@pytest.mark.parallel(2)
def test_models_and_their_memory_are_told() -> None:
    rows = list(models(QUICK, TINY))
    check(rows, "model")
    assert len(rows) == 2 * len(TINY)
    rows = list(memory(QUICK, TINY[:1]))
    check(rows, "memory")
    assert len(rows) == 2 and all(0.5 < row.value < 3 for row in rows)
    assert rows == list(memory(QUICK, TINY[:1])), "memory is counted, and alike every time"


@pytest.mark.parallel(2)
def test_what_a_step_loses_is_the_sum_of_its_parts() -> None:
    tiny = [network._replace(shape=(*network.shape[:2], 32, 32)) for network in CASES[:2]]
    rows = list(losses(QUICK, tiny))
    assert len(rows) == 2 * (1 + len(PARTS))
    for total, *parts in (rows[: 1 + len(PARTS)], rows[1 + len(PARTS) :]):
        assert total.measure == "over the block alone" and total.bound == parts[-1].bound
        taken = [(row.subject, row.bound) for row in parts]
        assert taken[0][0] == total.subject
        assert all(a[1] == b[0] for a, b in pairwise(taken)), "each goes on where one has ended"


@pytest.mark.parallel(2)
def test_the_operators_of_a_step_are_told() -> None:
    tiny = CASES[1]._replace(shape=(1, 32, 32, 32))
    heads, total, *rows = operators(tiny, steps=1, rows=100).splitlines()
    assert heads.startswith("operator") and total.startswith("all")
    named = {row.split("  ")[0].strip() for row in rows}
    assert {"aten::convolution_backward", "_BatchNorm", "_OverlappedLinear"} <= named


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
@pytest.mark.parametrize("benchmark", OF_NETWORKS)
def test_a_network_of_the_user_is_measured(benchmark: str, own: Path, capsys) -> None:
    command = ["bench", benchmark, "--model", f"{own}:planes", "--shape", "1,2,16,16", "--json"]
    assert main([*command, "--seconds", "0"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert bool(rows) is (MPI.COMM_WORLD.rank == 0)
    for row in rows:
        assert (row["benchmark"], row["case"]) == (benchmark, f"{own}:planes")
        assert "1x2x16x16" in row["configuration"] and row["rounds"]


@pytest.mark.parallel(2)
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("loss --model {own}:flat --shape 1,2,16,16", "on rank 0: an input of 1x2x8x16 raises"),
        ("model --model {own}:planes --shape 1,3,16,16", "an input of 1x3x16x16 raises"),
        ("memory --model {own}:Pair --shape 1,2,16,16", "it returns tuple"),
        ("loss --model {own}:planes --shape 4,2", "no spatial dimension to cut; give a --grid"),
        ("loss --model {own}:planes", "--model and --shape go together"),
        ("layer --model {own}:planes --shape 1,2,16,16", "memory_format, not of layer"),
    ],
)
def test_a_network_that_cannot_be_measured_is_told_on_every_rank(
    options: str, told: str, own: Path, capsys
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", *options.format(own=own).split()])
    assert end.value.code == 2
    said = MPI.COMM_WORLD.bcast(capsys.readouterr().err)
    assert told in " ".join(said.split())


@pytest.mark.parallel(2)
def test_networks_with_channels_last_keep_them_last(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    convolve = nn.functional.conv2d

    def watched(x: Any, weight: Any, *more: Any) -> Any:
        if isinstance(x, dc.DistTensor):
            seen.append(x.shard.is_contiguous(memory_format=torch.channels_last))
            assert weight.is_contiguous(memory_format=torch.channels_last) is seen[-1]
        return convolve(x, weight, *more)

    monkeypatch.setattr(nn.functional, "conv2d", watched)
    network = CASES[1]._replace(shape=(1, 32, 16, 16))
    rows = list(memory_formats(QUICK, [network], [("width", 4, 16)]))
    check(rows, "memory_format")
    assert [row.configuration[:8] for row in rows] == ["height=2", "width=2,", "width=2,"]
    layers, calls = 17, len(seen) // 17
    assert seen.count(True) == seen.count(False) == calls * layers // 2


@pytest.mark.parallel(2)
@pytest.mark.parametrize("collectives", [False, True])
def test_a_silent_step_sends_nothing_and_changes_nothing(
    collectives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = CASES[0]._replace(shape=(1, 3, 16, 16))
    grid = QUICK.grid(4)
    model = dc.parallelize(made(network), grid)
    step = unchanging_step(network, model, *cut_sample(network, grid))
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


def test_a_peak_is_counted_to_the_byte() -> None:
    def make() -> Callable[[], None]:
        kept = torch.ones(1000)

        def step() -> None:
            doubled = kept * 2
            del doubled
            _ = torch.cat([kept, kept, kept])

        return step

    peak = peak_of(make)
    assert peak.step == 12000 and peak.whole == 16000


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
    assert main(["bench", "layer", "--json", "--seconds", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["case"] for line in lines] == ["tiny", "tiny"]


@pytest.mark.parallel(2)
def test_a_layer_written_by_hand_computes_what_the_serial_one_does() -> None:
    case = Case("tiny", lambda: nn.Conv2d(3, 5, 3, padding=1, bias=False), (2, 3, 8, 6), 1.15)
    check(list(handwritten(QUICK, case)), "handwritten")
    torch.manual_seed(0)
    layer, x, dy = case.make(), torch.randn(case.shape), torch.randn(2, 5, 8, 6)
    half = slice(0, 4) if MPI.COMM_WORLD.rank == 0 else slice(4, 8)
    block = x[:, :, half].clone()
    by_hand = ByHand(layer)
    step_by_hand(by_hand, block, dy[:, :, half].clone())()
    made = {"y": by_hand(block).detach(), "dx": block.grad, "dw": layer.weight.grad}
    layer.weight.grad = None
    y = layer(x.requires_grad_())
    y.backward(dy)
    assert x.grad is not None
    serial = {"y": y[:, :, half].detach(), "dx": x.grad[:, :, half], "dw": layer.weight.grad}
    torch.testing.assert_close(made, serial)


@pytest.mark.parallel(2)
def test_halos_that_are_sent_early_are_those_that_are_sent_when_needed() -> None:
    case = sending_early.Case(4, 12, 6, 4)
    check(list(sending_early.sending_early(QUICK, [case])), "sending_early")
    grid = dc.ProcessGrid(height=2, device="cpu")
    chain = sending_early.chain_of(case, grid, torch.float64)
    x, dy, weights = sending_early.numbers(case, torch.float64)
    y = x.requires_grad_()
    for weight in weights:
        y = torch.conv2d(y, weight.requires_grad_(), padding=1).relu()
    y.backward(dy)
    assert x.grad is not None
    half = slice(0, 6) if grid.rank == 0 else slice(6, 12)
    outputs = y[:, :, half].detach()
    for result in (chain.overlapped(), chain.early(), chain.early_forward()):
        torch.testing.assert_close(result.outputs, outputs)
        torch.testing.assert_close(result.of_inputs, x.grad[:, :, half])
        for weight, part in zip(reversed(weights), result.of_weights, strict=True):
            whole = torch.from_numpy(grid.comm.allreduce(part.contiguous().numpy()))
            torch.testing.assert_close(whole, weight.grad)
    torch.testing.assert_close(chain.assembled(), outputs)
    torch.testing.assert_close(chain.assembled_early(), outputs)


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


def test_halos_of_one_rank_and_grids_that_do_not_fit_are_refused(capsys) -> None:
    for arguments, message in (
        (["bench", "halo"], "one rank has no halos"),
        (["bench", "layer", "--grid", "height=2"], "mpiexec -n 2 python -m distconv bench"),
    ):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2 and message in capsys.readouterr().err
