"""A job ends though a graph that holds messages is alive, or NCCL does not close.

These tests launch jobs of their own, with stand-ins for the GPU, its graphs and torch's NCCL.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.grid.test_abort import job

SET_UP = """
import gc, time
import pytest
from datetime import timedelta
from distconv.device import streams
from distconv.device.streams import SideStream
from distconv.grid import communicators
from tests.support.nccl import ProcessGroup
from tests.support.recorded import RecordedCarrier, RecordedGraph
from tests.support.streams import replace_streams

patch = pytest.MonkeyPatch()
replace_streams(patch)
patch.setattr("distconv.transport.torch.make_group", ProcessGroup)
patch.setattr(torch.accelerator, "Graph", RecordedGraph, raising=False)
patch.setattr(streams, "why_no_graphs", lambda device: None)
communicators._store().carriers.clear()
communicators._store().transports.clear()
cpu, ended = torch.device("cpu"), []

def connected(comm, *_):
    store, limit = torch.distributed.HashStore(), timedelta(seconds=60)
    return RecordedCarrier(comm, store, cpu, limit, SideStream(cpu))

def end(how, waits):
    def ends(group):
        while waits():
            time.sleep(0.01)
        print(how, flush=True)
    return ends

def captured():
    return any(graph.calls for graph in RecordedGraph.alive)

communicators._connected = connected
ProcessGroup.shutdown = end("closed", captured)
ProcessGroup.abort = end("aborted", captured)
grid = dc.ProcessGrid(height=-1)
x = dc.distribute_tensor(torch.ones(1, 1, 8, 8), grid)
model = dc.parallelize(torch.nn.Conv2d(1, 1, 3, padding=1), grid)
"""

JOBS = {
    "a compiled module": """
compiled = dc.compile(model)
for _ in range(6): compiled(x).square().mean().backward()
assert compiled.replays and captured()
""",
    "a graph of the program": """
graph = RecordedGraph()
with graph: model(x)
gc.freeze()
assert captured()
""",
    "closing that does not end": """
model(x)
communicators._PATIENCE = 0.5
ProcessGroup.shutdown = end("closed", lambda: True)
""",
    "aborting that does not end": """
model(x)
communicators._PATIENCE = 0.5
ProcessGroup.shutdown = ProcessGroup.abort = end("", lambda: True)
""",
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CompletedProcess[str]]:
    """Run all jobs at a time, as they mostly wait; return how each ended."""
    folders = [tmp_path_factory.mktemp("job") for _ in JOBS]
    root = str(Path(__file__).parents[2])

    def end(body: str) -> CompletedProcess[str]:
        return job(folders.pop(), SET_UP + body, DISTCONV_TRANSPORT="mpi", PYTHONPATH=root)

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(JOBS, pool.map(end, JOBS.values()), strict=True))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["a compiled module", "a graph of the program"])
def test_graphs_are_let_go_before_carriers_close(
    ends: dict[str, CompletedProcess[str]], name: str
) -> None:
    end = ends[name]
    assert (end.returncode, end.stderr) == (0, "")
    assert "closed" in end.stdout and "aborted" not in end.stdout


@pytest.mark.timeout(300)
def test_carriers_that_do_not_close_are_aborted(ends: dict[str, CompletedProcess[str]]) -> None:
    end = ends["closing that does not end"]
    assert end.returncode == 0 and "aborted" in end.stdout
    said = "connections between accelerators were not closed within 0.5 s and are aborted"
    assert end.stderr.count(said) == 2


@pytest.mark.timeout(300)
def test_a_job_ends_though_aborting_does_not(ends: dict[str, CompletedProcess[str]]) -> None:
    assert ends["aborting that does not end"].returncode == 0
