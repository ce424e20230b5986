"""A GPU that waits in vain for other ranks ends the job, and so does an error of NCCL.

No host waits then. These tests launch jobs of their own, with stand-ins for the GPU, for cupy and
for torch's NCCL.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.grid.test_abort import job

SET_UP = """
import time
import pytest
from datetime import timedelta
from types import SimpleNamespace
from distconv.grid import communicators
from distconv.device.streams import SideStream
from distconv.transport.nccl import NCCLTransport
from distconv.transport.torch import TorchStreamTransport
from tests.support.nccl import Communicator, ProcessGroup, replace_cupy
from tests.support.streams import Stream, replace_streams

F = torch.nn.functional
one = grid.rank == 1
patch = pytest.MonkeyPatch()
replace_streams(patch)
replace_cupy(patch)
patch.setattr("distconv.transport.torch.make_group", ProcessGroup)
communicators._store().carriers.clear()
communicators._store().transports.clear()

def new_grid(by_cupy):
    global x
    device, limit, store = torch.device("cpu"), timedelta(seconds=60), torch.distributed.HashStore()
    def connected(comm, *_):
        side = SideStream(device)
        if by_cupy:
            return NCCLTransport(comm, device, side)
        return TorchStreamTransport(comm, store, device, limit, side)
    communicators._connected = connected
    x = dc.distribute_tensor(torch.ones(1, 1, 8, 8), dc.ProcessGrid(height=-1))
    F.avg_pool2d(x, 3, 1, 1)

"""

STUCK = """
new_grid({by_cupy})
if one: Stream.query = lambda event: False
time.sleep(1000)
"""

JOBS = {
    "a GPU waits, cupy": STUCK.format(by_cupy=True),
    "a GPU waits, torch": STUCK.format(by_cupy=False),
    "cupy's NCCL fails": "new_grid(True)\nif one: Communicator.lost = True\ntime.sleep(1000)",
    "torch's watchdog fires": """
new_grid(False)
if one: ProcessGroup.error = SimpleNamespace(name="TIMEOUT")
time.sleep(1000)
""",
    "nothing": "for by_cupy in (True, False):\n    new_grid(by_cupy)\n    time.sleep(3)",
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CompletedProcess[str]]:
    """Run all jobs at a time, as they mostly wait; return how each ended."""
    folders = [tmp_path_factory.mktemp("job") for _ in JOBS]
    root = str(Path(__file__).parents[2])

    def end(body: str) -> CompletedProcess[str]:
        variables = {"DISTCONV_TIMEOUT": "4", "DISTCONV_TRANSPORT": "mpi", "PYTHONPATH": root}
        return job(folders.pop(), SET_UP + body, **variables)

    with ThreadPoolExecutor(8) as pool:
        return dict(zip(JOBS, pool.map(end, JOBS.values()), strict=True))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("by", ["cupy", "torch"])
def test_a_gpu_that_waits_too_long_ends_the_job(
    ends: dict[str, CompletedProcess[str]], by: str
) -> None:
    end = ends[f"a GPU waits, {by}"]
    assert end.returncode != 0
    assert end.stderr.count("ranks wait for more than DISTCONV_TIMEOUT=4 seconds") == 1, end.stderr
    assert "rank 1: its GPU waiting for" in end.stderr
    assert "s in torch.nn.functional.avg_pool2d; the host elsewhere at" in end.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("cupy's NCCL fails", "ranks wait in vain: NCCL_ERROR_REMOTE_ERROR (rank 1)"),
        (
            "torch's watchdog fires",
            "in vain: torch.distributed reports TIMEOUT of torch.distributed (rank 1)",
        ),
    ],
)
def test_an_error_that_nobody_waits_for_ends_the_job(
    ends: dict[str, CompletedProcess[str]], what: str, message: str
) -> None:
    end = ends[what]
    assert end.returncode != 0 and end.stderr.count(message) == 1, end.stderr


@pytest.mark.timeout(300)
def test_a_job_whose_gpus_wait_for_a_while_ends_in_silence(
    ends: dict[str, CompletedProcess[str]],
) -> None:
    assert (ends["nothing"].returncode, ends["nothing"].stderr) == (0, "")
