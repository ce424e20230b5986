"""A timeline holds what all ranks do, on one clock, and changes no number."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv.__main__ import main
from distconv.planning.timeline import union_length
from distconv.tools.timeline import (
    Offset,
    measure_offsets,
    on_clock_of_rank_0,
    read_trace,
    spans,
    times_of_ranks,
)
from examples import timeline as example
from tests.support.everywhere import ended_with_one_line
from tests.support.serial import raised_everywhere

WORLD = MPI.COMM_WORLD


def step(model: torch.nn.Module, grid: dc.ProcessGrid) -> list[torch.Tensor]:
    """Run a training step with halos, a redistribution and reductions; return the gradients."""
    x = dc.distribute_tensor(torch.arange(128.0).view(2, 1, 8, 8), grid).requires_grad_()
    y = model(x).redistribute(dc.Layout(sample=("sample", "height")))
    y.square().mean().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return [*gradients, x.grad.full_tensor()]


@pytest.mark.parallel([2, 4])
def test_all_that_travels_is_there_with_its_bytes(folder: Path) -> None:
    grid = dc.ProcessGrid(sample=-1, height=2)
    torch.manual_seed(0)
    model = dc.parallelize(torch.nn.Conv2d(1, 1, 3, padding=1), grid)
    plain = step(model, grid)
    carrier = grid.transport.carrier  # type: ignore[attr-defined]
    file = folder / "trace.json"
    with dc.timeline(file):
        recorded = step(model, grid)
    assert grid.transport.carrier is carrier  # type: ignore[attr-defined]
    assert all(map(torch.equal, plain, recorded))
    WORLD.barrier()
    document = json.loads(file.read_text())
    assert len(document["distconv"]["clock_error_us"]) == WORLD.size
    events = read_trace(file)
    assert {e["pid"] for e in events} == set(range(WORLD.size))
    assert min(e["ts"] for e in events if e["ph"] != "M") == 0
    samples = 2 // grid.shape["sample"]
    for row in times_of_ranks(events):
        # A row of 8 numbers for each sample; in the backward pass also to the input.
        assert row.bytes["halo"] == 2 * samples * 8 * 4
        # Half of a sample comes from the neighbour, and half of the other's gradient; and then the
        # neighbour's halves of the gradients of both inputs.
        if WORLD.size == 2:
            assert row.bytes["redistribution"] == (1 + 1 + 2) * 4 * 8 * 4
        # Weights and bias, each with a flag.
        assert row.bytes["gradient reduction"] == (9 + 1 + 2) * 4
        assert row.bytes["reduction"] > 0 and "message" not in row.bytes
        assert 0 < row.compute <= row.seconds and 0 < row.wait <= row.seconds
        for kind, length in row.under_way.items():
            assert row.exposed[kind] <= length
    assert any("conv" in span.name for span in spans(events, "compute"))
    # Operators that another one calls lie within it, to the last place.
    for rank in range(WORLD.size):
        ends = [0.0]
        mine = [e for e in events if e["pid"] == rank]
        for span in sorted(spans(mine, "compute"), key=lambda s: (s.begin, -s.end)):
            while ends[-1] < span.begin - 0.002 and len(ends) > 1:
                ends.pop()
            assert len(ends) == 1 or span.end <= ends[-1] + 0.002
            ends.append(span.end)
    operators = {e["args"]["operator"] for e in events if e["ph"] == "b" and e["cat"] == "halo"}
    assert any("conv2d" in name for name in operators)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize(
    "profiler", [torch.profiler.profile, torch.autograd.profiler.profile, dc.timeline]
)
def test_a_second_profiler_is_refused_and_the_first_goes_on(profiler: Any, folder: Path) -> None:
    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(torch.nn.Conv2d(1, 1, 3, padding=1), grid)
    arguments = [folder / "second.json"] if profiler is dc.timeline else []
    with dc.timeline(folder / "trace.json"):
        message = raised_everywhere(RuntimeError, lambda: profiler(*arguments).__enter__())
        step(model, grid)
    assert "one profile at a time" in message
    WORLD.barrier()
    events = read_trace(folder / "trace.json")
    assert any("conv" in e["name"] for e in events)
    if profiler is dc.timeline:
        return
    with profiler() as first:
        message = raised_everywhere(RuntimeError, dc.timeline(folder / "third.json").__enter__)
        step(model, grid)
    assert "one profile at a time" in message and not (folder / "third.json").exists()
    assert any("conv" in e.key for e in first.key_averages())


@pytest.mark.parallel([2])
def test_a_profiler_on_one_rank_alone_is_refused_on_all(folder: Path) -> None:
    with torch.profiler.profile() if WORLD.rank else nullcontext():
        raised_everywhere(RuntimeError, dc.timeline(folder / "trace.json").__enter__)


@pytest.mark.parallel([2])
def test_the_example_shows_halos_under_way_while_convolutions_compute(folder: Path) -> None:
    example.main(str(folder / "trace.json"))
    WORLD.barrier()
    events = [e for e in read_trace(folder / "trace.json") if e["pid"] == WORLD.rank]
    halos = spans(events, "halo")
    computed = [span for span in spans(events, "compute") if "conv" in span.name]
    assert len(halos) == 9  # of five convolutions, the first of which gives its input no gradient
    hidden = sum(any(h.begin <= c.begin and c.end <= h.end for c in computed) for h in halos)
    assert hidden == 9


@pytest.mark.parallel([1, 2])
def test_nothing_is_written_after_an_error(folder: Path) -> None:
    file = folder / "trace.json"

    def fails() -> None:
        with dc.timeline(file):
            raise ValueError("in the program")

    assert raised_everywhere(ValueError, fails) == "in the program"

    def no_folder() -> None:
        with dc.timeline(folder / "none" / "trace.json"):
            raise AssertionError("not reached")

    assert "no folder" in raised_everywhere(FileNotFoundError, no_folder)
    assert list(folder.iterdir()) == []
    with dc.timeline(folder / "trace.json.gz"):
        torch.ones(3).sum()
    WORLD.barrier()
    assert read_trace(folder / "trace.json.gz")


@pytest.mark.parallel([1, 2, 4])
def test_offsets_of_clocks_are_found_within_their_error() -> None:
    grid = dc.ProcessGrid(sample=-1)
    skew = 10**9 * WORLD.rank
    for rank, offset in enumerate(measure_offsets(grid, lambda: time.time_ns() + skew)):
        # The ranks of a test share a clock.
        assert abs(offset.ahead - 10**9 * rank) <= offset.error + 1
        assert (offset.error > 0) == (rank > 0)


def test_a_clock_that_drifts_is_set_right_in_between() -> None:
    before, after = Offset(2000.0, 0.0, 10_000), Offset(4000.0, 0.0, 20_000)
    events: list[dict[str, Any]] = [{"ph": "X", "ts": ts} for ts in (0.0, 5.0, 10.0)]
    right = on_clock_of_rank_0(events, before, after, 1_000)
    assert [e["ts"] for e in right] == [7.0, 11.0, 15.0]


def test_a_timeline_is_added_up(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def row(cat: str, name: str, ts: float, dur: float) -> dict[str, Any]:
        place = {"pid": 0, "tid": 0, "ts": ts, "dur": dur}
        return {"ph": "X", "cat": cat, "name": name} | place

    both = {"cat": "halo", "name": "halo", "pid": 0, "id": "0.1"}
    args = {"bytes": 64, "operator": "conv2d"}
    events = [
        row("cpu_op", "ConvolveBackward", 0, 8000),
        row("cpu_op", "aten::conv2d", 0, 4000),
        row("cpu_op", "aten::convolution", 500, 3000),
        row("cpu_op", "aten::add", 6000, 2000),
        row("user_annotation", "wait for halo", 4000, 1000),
        both | {"ph": "b", "ts": 1000, "args": args},
        both | {"ph": "e", "ts": 5000},
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": events, "distconv": {}}))
    assert main(["timeline", str(file)]) == 0
    assert capsys.readouterr().out == (
        "rank 0: 8.0 ms, computes 6.0 ms, waits 1.0 ms\n"
        "  halo: 64 bytes, in flight 4.0 ms, waited for 1.0 ms, 75% overlapped\n"
    )
    assert main(["timeline", str(file), "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert shown["under_way"] == {"halo": 0.004}
    assert union_length([(0, 2), (1, 3), (5, 6)]) == 4
    file.write_text("{}")
    message = "is not a timeline; record one by"
    ended_with_one_line(lambda: main(["timeline", str(file)]), message, capsys)
