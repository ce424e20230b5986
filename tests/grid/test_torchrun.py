"""Ranks that torchrun starts, or a program by torch.distributed, make grids without any MPI.

These tests launch jobs of their own.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.jobs import end_of, forked, start, started, torchrun

SCRIPT = """
import os, sys
sys.modules["mpi4py"] = None  # as where it cannot be loaded
import torch, distconv as dc

grid = dc.ProcessGrid(height=-1)
whole = torch.arange(2.0 ** 12).reshape(1, 1, -1, 2 ** 6)
x = dc.distribute_tensor(whole, grid)

def exchange():
    while True:
        torch.nn.functional.avg_pool2d(x, 3, 1, 1).sum().item()

{body}
"""


def job(
    tmp_path: Path, body: str, ranks: int = 2, script: str = SCRIPT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a job of torchrun, whose ranks are forked with torch imported; return how it ended."""
    path = tmp_path / "script.py"
    path.write_text(script.format(body=body))
    return end_of(started([*torchrun(ranks), *forked(path)], **variables))


def test_ranks_of_torchrun_compute_together_without_mpi(tmp_path: Path) -> None:
    body = """
F = torch.nn.functional
assert grid.transport.name == "torch" and grid.size == 3 and "mpi4py.MPI" not in sys.modules
assert torch.equal(F.avg_pool2d(x, 3, 1, 1).full_tensor(), F.avg_pool2d(whole, 3, 1, 1))
assert x.sum().item() == whole.sum().item()
comm = grid.comm
assert (comm.rank, comm.size) == (grid.rank, 3) and comm.bcast([comm.rank]) == [0]
assert comm.allgather("a" * comm.rank) == ["", "a", "aa"]
# Some of the ranks, in another order.
if grid.rank != 1:
    part = dc.ProcessGrid([2, 0], width=2)
    assert part.ranks == (2, 0) and part.rank == (0 if grid.rank else 1)
    assert dc.distribute_tensor(whole, part).sum().item() == whole.sum().item()
alone = dc.ProcessGrid([grid.rank])
assert dc.distribute_tensor(whole, alone).sum().item() == whole.sum().item()
model = dc.parallelize(torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2)), grid)
model(x).square().mean().backward()
dc.verify(torch.nn.Conv2d(1, 1, 3, padding=1), torch.ones(1, 1, 9, 9), grid, show=False)
print("done")
"""
    end = job(tmp_path, body, 3)
    assert (end.returncode, end.stdout.count("done")) == (0, 3), end.stderr


def test_a_default_group_of_the_program_is_joined(tmp_path: Path) -> None:
    script = """
import os, sys
import torch, distconv as dc
from torch import distributed, multiprocessing

def main(rank, meeting):
    # The ranks are numbered as the program says.
    distributed.init_process_group("gloo", init_method=meeting, rank=2 - rank, world_size=3)
    grid = dc.ProcessGrid(height=-1)
    assert (grid.rank, grid.size, grid.transport.name) == (2 - rank, 3, "torch")
    whole = torch.arange(64.0).reshape(1, 1, 8, 8)
    assert dc.distribute_tensor(whole, grid).sum().item() == 2016
    group = distributed.new_group([0, 2])
    if grid.rank != 1:
        part = dc.ProcessGrid(group, width=-1)
        assert part.ranks == (0, 2)
        assert dc.distribute_tensor(whole, part).sum().item() == 2016
    distributed.barrier()
    assert "mpi4py.MPI" not in sys.modules
    print("done")

if __name__ == "__main__":
    multiprocessing.start_processes(main, (sys.argv[1],), 3, start_method="fork")
"""
    path = tmp_path / "script.py"
    path.write_text(script)
    end = end_of(start(path, 0, f"file://{tmp_path}/meeting", fresh=False))
    assert (end.returncode, end.stdout.count("done")) == (0, 3), end.stderr


def test_a_grid_of_one_rank_in_a_world_of_several_is_an_error(tmp_path: Path) -> None:
    end = job(tmp_path, "dc.ProcessGrid()")
    assert end.returncode != 0
    # On a busy machine rank 1 reports it too, before rank 0 has ended the job.
    assert end.stderr.count("all axes 1 makes 1 of 2 ranks; set one axis to -1") in (1, 2)


def test_mpi_is_refused_with_the_way_out(tmp_path: Path) -> None:
    end = job(tmp_path, "dc.ProcessGrid(height=-1, transport='mpi')")
    assert end.returncode != 0
    assert "transport='mpi': MPI has not started the ranks; start them with mpiexec" in end.stderr
    assert "or choose 'torch'" in end.stderr


def test_a_rank_that_raises_ends_the_job_with_one_traceback(tmp_path: Path) -> None:
    end = job(tmp_path, "if grid.rank == 1: raise ValueError('lost my data')\nexchange()", 3)
    assert end.returncode != 0
    assert end.stderr.count("ValueError: lost my data") == 1
    assert "distconv: rank 1 of 3 raised" in end.stderr


HANGS = {
    "if grid.rank: __import__('time').sleep(1000)\nx.sum()": "DISTCONV_TIMEOUT=4 seconds",
    "if grid.rank: sys.exit()\nx.sum()": "ranks wait for rank 1, which has left the program",
    "if grid.rank: dc.ProcessGrid(width=-1)\nx.sum()": "rank 1: waiting",
}


def test_a_hang_ends_with_one_message(tmp_path_factory: pytest.TempPathFactory) -> None:
    folders = [tmp_path_factory.mktemp("job") for _ in HANGS]
    with ThreadPoolExecutor() as pool:  # at the same time, as they mostly wait
        ends = pool.map(lambda *which: job(*which, DISTCONV_TIMEOUT="4"), folders, HANGS)
    for end, message in zip(ends, HANGS.values(), strict=True):
        assert end.returncode != 0
        assert message in end.stderr and end.stderr.count("distconv: ranks wait") == 1


def test_a_rank_that_ends_in_the_middle_is_an_error_that_says_so(tmp_path: Path) -> None:
    end = job(tmp_path, "if grid.rank == 1: os._exit(0)\nexchange()")
    assert end.returncode != 0 and "distconv: rank 0 of 2 raised" in end.stderr
    assert "If the error reports a closed connection, another rank has ended" in end.stderr, (
        end.stderr
    )


MEETINGS = {
    "rank 0 waits for another": {"RANK": "0"},
    "nobody is there": {"RANK": "1"},
    "no such host": {"RANK": "1", "MASTER_ADDR": "no-such-host.invalid"},
    "no such rank": {"RANK": "-1"},
    "a rank too many": {"RANK": "2"},
    "another program has the port, and is silent": {"RANK": "1"},
}


def test_ranks_that_do_not_meet_end_within_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("import distconv as dc\ndc.ProcessGrid(height=-1)")

    def end(port: int, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
        meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-S", "-E", *forked(path)]
        return end_of(started(command, **meeting | variables, DISTCONV_TIMEOUT="2"))

    silent = socket.create_server(("127.0.0.1", 29_731 + len(MEETINGS) - 1))
    with silent, ThreadPoolExecutor() as pool:
        ends = list(pool.map(end, range(29_731, 29_740), MEETINGS.values()))
    for told, variables in zip((end.stderr for end in ends), MEETINGS.values(), strict=True):
        rank = variables["RANK"]
        if rank in ("0", "1"):
            assert (
                f"rank {rank} could not connect to the other ranks of WORLD_SIZE=2 at MASTER_ADDR="
                in told
            )
            assert "within DISTCONV_TIMEOUT=2 seconds" in told, told
        else:
            assert f"RANK={rank} is not a rank of WORLD_SIZE=2" in told, told


def test_workers_are_no_ranks(tmp_path: Path) -> None:
    script = """
import sys
import torch, distconv as dc
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self): return 2
    def __getitem__(self, i):
        try:
            dc.ProcessGrid(height=-1)
        except RuntimeError as error:
            return str(error)

if __name__ == "__main__":
    grid = dc.ProcessGrid(height=-1)
    for method in ("fork", "spawn"):
        for (text,) in DataLoader(Data(), num_workers=1, multiprocessing_context=method):
            assert "process" in text and "DistTensors" in text, text
    assert dc.distribute_tensor(torch.ones(1, 1, 4, 4), grid).sum().item() == 16
    print("done")
"""
    end = job(tmp_path, "", script=script.replace("{", "{{").replace("}", "}}"))
    assert (end.returncode, end.stdout.count("done")) == (0, 2), end.stderr
