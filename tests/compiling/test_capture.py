"""Passes are captured as graphs of their device: a recording stands for one on CPUs.

Nothing of this has run on a GPU. `tests/gpu/test_gpu_graphs.py` does the same there.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import HashStore

import distconv as dc
from distconv.compiling import capture
from distconv.compiling.trace import Pass
from distconv.device import streams
from distconv.device.streams import SideStream, StreamRequest
from distconv.grid import communicators
from tests.compiling.test_compile import CALLS, batches, classifier, identical, same_bits
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

    def new() -> Any:
        graph = RecordedGraph()
        return graph, graph

    monkeypatch.setattr(streams, "_new", new)
    monkeypatch.setattr(streams, "why_no_graphs", lambda device: None)
    yield watching
    gc.collect()  # requests that wait when they are dropped, for streams that stand in


Loop = Callable[[Any, nn.Module, dc.ProcessGrid], list[Any]]


def training(f: Any, model: nn.Module, grid: dc.ProcessGrid) -> list[Any]:
    """Train as most programs do; the last loss lives while the next one is computed."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in batches(grid):
        loss = F.cross_entropy(f(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def accumulating(f: Any, model: nn.Module, grid: dc.ProcessGrid) -> list[Any]:
    """Make two forward passes before their backward passes, and evaluate between."""
    losses = []
    for x, y in batches(grid):
        first, second = F.cross_entropy(f(x), y), F.cross_entropy(f(x * 0.5), y)
        with torch.no_grad():
            losses.append(f(x * 2))
        first.backward()
        second.backward()
        losses += [first.detach(), second.detach()]
    return losses


def repeating(f: Any, model: nn.Module, grid: dc.ProcessGrid) -> list[Any]:
    """Make a backward pass twice, another forward pass between."""
    for x, y in batches(grid):
        first = F.cross_entropy(f(x), y)
        first.backward(retain_graph=True)
        second = F.cross_entropy(f(x * 0.5), y)
        first.backward()
        second.backward()
    return []


def compared(loop: Loop, make_network: Callable[[], nn.Module] = network) -> Any:
    """Check that a loop has the same bits with the module captured; return the module."""
    grid = dc.ProcessGrid(height=-1, transport="mpi")

    def run(compiled: bool) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        model = dc.parallelize(make_network(), grid)
        f: Any = dc.compile(model) if compiled else model
        found = loop(f, model, grid)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [*found, *model.state_dict().values(), *gradients], f

    return same_bits(run)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Return a list to which each replay of a graph adds an entry."""
    made: list[None] = []
    replay = RecordedGraph.replay

    def noted(self: RecordedGraph) -> None:
        made.append(None)
        replay(self)

    monkeypatch.setattr(RecordedGraph, "replay", noted)
    return made


@pytest.mark.parallel([2])
@pytest.mark.parametrize(("loop", "fewest"), [(training, 2), (accumulating, 3), (repeating, 1)])
@pytest.mark.filterwarnings("error:compile")
def test_captured_passes_have_the_same_bits(
    sanitizer: Sanitizer, replays: list[None], loop: Loop, fewest: int
) -> None:
    assert compared(loop).replays >= CALLS - 2
    assert len(replays) >= fewest * (CALLS - 3)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("waits", [True, False])
def test_captured_passes_wait_for_all_that_they_use(
    sanitizer: Sanitizer, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = dc.ProcessGrid(height=-1, transport="mpi")
    model = dc.parallelize(small(), grid)
    compiled = dc.compile(model)
    if not waits:
        record = RecordedGraph.__enter__

        def forgets(self: RecordedGraph) -> RecordedGraph:
            monkeypatch.setattr(StreamRequest, "wait", lambda self: None)
            return record(self)

        monkeypatch.setattr(RecordedGraph, "__enter__", forgets)
    run = capture.CapturedPasses.run

    def watched(self: Any, *arguments: Any) -> Any:
        with sanitizer:  # torch.compile does not trace within a mode
            return run(self, *arguments)

    monkeypatch.setattr(capture.CapturedPasses, "run", watched)
    training(compiled, model, grid)
    assert compiled.replays == CALLS - 2 and (sanitizer.reports == []) is waits


def warned(grid: dc.ProcessGrid, make_network: Callable[[], nn.Module] = network) -> str:
    """Return what a rank says of passes that cannot be captured, and are replayed."""
    model = dc.parallelize(make_network(), grid)
    compiled = dc.compile(model)
    with told_once("compile:") as said:
        training(compiled, model, grid)
    assert compiled.replays == CALLS - 2
    return said[0]


@pytest.mark.parallel([2])
def test_what_cannot_be_captured_is_replayed_and_says_why(
    sanitizer: Sanitizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = dc.ProcessGrid(height=-1, transport="mpi")
    assert "without device graphs: it draws random numbers" in warned(grid, classifier)
    monkeypatch.setattr(RecordedCarrier, "ordered", False)
    monkeypatch.setattr(grid.transport, "ordered", False)
    assert "makes the host wait for the GPU" in warned(grid)


@pytest.mark.parallel([2])
def test_a_capture_that_fails_on_one_rank_leaves_all_without_graphs(
    sanitizer: Sanitizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = dc.ProcessGrid(height=-1, transport="mpi")

    class Fails(RecordedGraph):
        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            if grid.rank == 1:
                raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(streams, "_new", lambda: (Fails(),) * 2)
    assert "the capture failed: operation not" in warned(grid)


def test_a_tensor_of_the_host_is_named() -> None:
    made, taken = Pass(), Pass()
    made.graph.call_function(torch.ops.aten.ones.default, ([2],), {"device": CPU})
    taken.constant(torch.ones(3))
    for one, said in ((made, "it creates a tensor on cpu"), (taken, "shape (3,) on cpu")):
        assert said in capture.why_not(one, torch.device("meta"))


def moves(f: Any, model: nn.Module, grid: dc.ProcessGrid) -> list[Any]:
    """Give all parameters other memory after some calls."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for i, (x, y) in enumerate(batches(grid)):
        if i == CALLS - 2:
            for p in model.parameters():
                p.data = p.data.clone()
        loss = F.cross_entropy(f(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parallel([1])
def test_memory_that_has_moved_is_captured_anew(sanitizer: Sanitizer, replays: list[None]) -> None:
    assert compared(moves).replays == CALLS - 2


@pytest.mark.parallel([1])
def test_results_of_one_call_stay_when_the_next_is_made(sanitizer: Sanitizer) -> None:
    grid = dc.ProcessGrid(transport="mpi")
    compiled = dc.compile(dc.parallelize(network(), grid))
    losses = []
    for x, _ in batches(grid):
        loss = compiled(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
    values = [x.clone() for x in losses]
    for x, _ in batches(grid):
        compiled(x).square().mean().backward()
    assert identical(losses, values)
