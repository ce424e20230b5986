"""Steps are captured as graphs of their device: a recording stands for one on CPUs.

Nothing of this has run on a GPU. `tests/gpu/test_gpu_graphs.py` does the same there.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

import distconv as dc
from distconv.compiling import capture
from distconv.compiling.program import Existing, TracedCall, TracedStep, Value
from distconv.device import graphs
from distconv.device.streams import SideStream, StreamRequest
from distconv.grid import communicators
from tests.compiling.test_compile import (
    CALLS,
    STEPS,
    batches,
    check,
    classifier,
    identical,
    trained,
)
from tests.support.nccl import ProcessGroup
from tests.support.recorded import RecordedCarrier, RecordedGraph
from tests.support.sanitizer import Sanitizer
from tests.support.serial import told_once

CPU = torch.device("cpu")


def network() -> nn.Module:
    """Return the network of other tests, without the layer that draws random numbers."""
    return nn.Sequential(*(part for part in classifier() if not isinstance(part, nn.Dropout)))  # type: ignore[attr-defined]


def small() -> nn.Module:
    """Return a network with halos and sums in both passes."""
    convolution, norm = nn.Conv2d(3, 2, 3, 2, 1), nn.BatchNorm2d(2)
    return nn.Sequential(convolution, norm, nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.fixture
def sanitizer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sanitizer]:
    """Watch streams, which carry messages by a stand-in for NCCL, and record graphs."""
    watching = Sanitizer()
    watching.replace_streams(monkeypatch)
    monkeypatch.setattr("distconv.transport.torch.make_group", ProcessGroup)
    monkeypatch.setattr("tests.support.nccl.Communicator.launched", watching.launched)
    made = communicators._store()
    monkeypatch.setattr(made, "carriers", {})
    monkeypatch.setattr(made, "transports", {})

    def carrier(comm: Any, *_: Any) -> RecordedCarrier:
        limit = timedelta(seconds=60)
        return RecordedCarrier(comm, HashStore(), CPU, limit, SideStream(CPU))

    monkeypatch.setattr(communicators, "_connected", carrier)

    def new(device: torch.device) -> Any:
        graph = RecordedGraph()
        return graph, graph

    monkeypatch.setattr(graphs, "_new", new)
    monkeypatch.setattr(graphs, "why_no_graphs", lambda device: None)
    yield watching
    gc.collect()  # requests that wait when they are dropped, for streams that stand in


@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", ["plain", "with_accumulation", "with_average"])
@pytest.mark.filterwarnings("error:compile")
def test_a_captured_step_has_the_same_bits(sanitizer: Sanitizer, name: str) -> None:
    step = check(STEPS[name], network, "graph", height=-1, transport="mpi")
    assert step.replays == CALLS - 3 and "graph" in step.source


@pytest.mark.parallel([2])
@pytest.mark.parametrize("waits", [True, False])
def test_a_captured_step_waits_for_all_that_it_uses(
    sanitizer: Sanitizer, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sanitizer:
        grid = dc.ProcessGrid(height=-1, transport="mpi")
        if not waits:
            record = RecordedGraph.__enter__

            def forgets(self: RecordedGraph) -> RecordedGraph:
                monkeypatch.setattr(StreamRequest, "wait", lambda self: None)
                return record(self)

            monkeypatch.setattr(RecordedGraph, "__enter__", forgets)
        trained(STEPS["with_momentum"], True, grid, small, "graph")
    assert (sanitizer.reports == []) is waits


def warned(grid: dc.ProcessGrid, make_network: Any = network) -> str:
    """Return what a rank says of a step that cannot be captured, and is replayed."""
    with told_once("compile:") as said:
        made = trained(STEPS["plain"], True, grid, make_network, "graph")[1]
    assert made.replays == CALLS - 3
    return said[0]


@pytest.mark.parallel([2])
def test_what_cannot_be_captured_is_replayed_and_says_why(
    sanitizer: Sanitizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = dc.ProcessGrid(height=-1, transport="mpi")
    assert "without graphs of the device, as it draws random numbers" in warned(grid, classifier)
    monkeypatch.setattr(RecordedCarrier, "ordered", False)
    monkeypatch.setattr(grid.transport, "ordered", False)
    assert "lets the host wait for the GPU" in warned(grid)


@pytest.mark.parallel([2])
def test_on_cpus_there_are_no_graphs() -> None:
    assert "graphs are for GPUs" in warned(dc.ProcessGrid(height=-1, device="cpu"))


@pytest.mark.parallel([2])
def test_a_capture_that_fails_on_one_rank_is_an_error_on_all(
    sanitizer: Sanitizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = dc.ProcessGrid(height=-1, transport="mpi")

    class Fails(RecordedGraph):
        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            if grid.rank == 1:
                raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "_new", lambda device: (Fails(),) * 2)
    with pytest.raises(RuntimeError, match="on rank 1: operation not .*='graph' out"):
        trained(STEPS["plain"], True, grid, network, "graph")


def test_a_module_alone_is_not_captured() -> None:
    with pytest.raises(ValueError, match="captures a whole step; pass a function"):
        dc.compile(nn.ReLU(), backend="graph")


def test_a_tensor_of_the_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "why_no_graphs", lambda device: None)
    ones = TracedCall(torch.ops.aten.ones.default, ([2],), {"device": CPU}, 0)
    taken = TracedCall(torch.ops.aten.add.Tensor, (Existing(0), Value(0)), {}, 1)
    grid: Any = SimpleNamespace(device=torch.device("meta"))
    for calls, said in (([ones], "it makes a tensor on cpu"), ([taken], "shape (3,) on cpu")):
        step = TracedStep([], calls, [], {0: torch.ones(3)}, [])
        assert said in capture.why_not(step, grid)


@pytest.mark.parallel([1])
def test_memory_that_has_moved_is_captured_anew(sanitizer: Sanitizer) -> None:
    grid = dc.ProcessGrid(transport="mpi")
    torch.manual_seed(0)
    models = [dc.parallelize(network(), grid) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    steps: Any = [STEPS["with_momentum"](model, grid) for model in models]
    steps[1] = dc.compile(steps[1], backend="graph")
    for i, batch in enumerate(batches(grid)):
        if i == CALLS - 2:
            for p in (p for model in models for p in model.parameters()):
                p.data = p.data.clone()
        mine, theirs = (step(*batch) for step in steps)
        assert identical(mine, theirs)
    assert steps[1].replays == CALLS - 3


@pytest.mark.parallel([1])
def test_results_of_one_call_stay_when_the_next_is_made(sanitizer: Sanitizer) -> None:
    grid = dc.ProcessGrid(transport="mpi")
    step: Any = dc.compile(STEPS["plain"](dc.parallelize(network(), grid), grid), backend="graph")
    losses = [step(*batch) for batch in batches(grid)]
    values = [x.clone() for x in losses]
    for batch in batches(grid):
        step(*batch)
    assert identical(losses, values)
