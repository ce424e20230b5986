"""Processes that a rank starts, such as workers of a DataLoader, do without MPI."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.grid.test_interrupt import assert_gone
from tests.support.jobs import end_of, start


def ended(
    tmp_path: Path, program: str, ranks: int = 0, *arguments: str, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a program on this number of ranks, without a launcher for 0, and return how it ended.

    For `fresh` see `start`.
    """
    script = tmp_path / "program.py"
    script.write_text(program)
    return end_of(start(script, ranks, *arguments, fresh=fresh))


def test_importing_the_library_starts_no_mpi_and_imports_no_training(tmp_path: Path) -> None:
    program = """
import sys
import distconv, distconv.layers, distconv.tools.command_line
import distconv.__main__
assert "mpi4py.MPI" not in sys.modules and "distconv.training" not in sys.modules
assert distconv.training.max_batch(9) == 3
distconv.ProcessGrid()
assert "mpi4py.MPI" in sys.modules
"""
    end = ended(tmp_path, program, fresh=True)
    assert (end.returncode, end.stderr) == (0, "")


@pytest.mark.parametrize("missing", ["mpi4py", "mpi4py.MPI"])
def test_without_mpi_one_process_plans_and_trains_alone(tmp_path: Path, missing: str) -> None:
    program = f"""
import sys
sys.modules[{missing!r}] = None
import torch, distconv as dc
dc.explain(torch.nn.Conv2d(1, 1, 3), (1, 1, 9, 9), {{"height": 2}})
grid = dc.ProcessGrid()
model = dc.parallelize(torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2)), grid)
model(dc.distribute_tensor(torch.rand(2, 1, 8, 8), grid)).square().mean().backward()
assert all(p.grad is not None for p in model.parameters())
print(grid, grid.transport.name, grid.comm.allgather(3), dc.full_state_dict(model)["0.bias"].shape)
dc.verify(torch.nn.Conv2d(1, 1, 3), torch.ones(1, 1, 9, 9), grid)
"""
    end = ended(tmp_path, program)
    assert "Conv2d on rank 1 of ProcessGrid(height=2)" in end.stdout
    assert "ProcessGrid() on 1 rank torch [3] torch.Size([2])" in end.stdout
    assert (end.returncode, end.stderr) == (0, "")


def test_without_mpi_a_rank_of_several_is_an_error(tmp_path: Path) -> None:
    program = """
import sys
sys.modules["mpi4py"] = None
import distconv as dc
dc.ProcessGrid()
"""
    end = ended(tmp_path, program, 2)
    assert end.returncode != 0
    assert "PMI_SIZE=2 declares 2 ranks" in end.stderr


LOADER = """
import sys
import torch, distconv as dc
from torch.utils.data import DataLoader, Dataset

start, act = sys.argv[1:]

class Squares(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        if act == "raise":
            raise ValueError("unreadable")
        if act == "grid":
            dc.ProcessGrid(height=-1)
        if start != "fork":
            assert "mpi4py.MPI" not in sys.modules
        return torch.full((1, 4, 4), float(i))

class Boxes(Squares):
    "Has been given a grid, which a forked worker may ask for its box."
    def __init__(self, grid):
        self.grid = grid

    def __getitem__(self, i):
        x = super().__getitem__(i)
        if act == "tensor":
            return dc.DistTensor.from_local(x[None], self.grid)
        return x[dc.local_box((4, *x.shape), self.grid).slices[1:]]

if __name__ == "__main__":
    grid = dc.ProcessGrid(height=-1)
    data = Boxes(grid) if start == "fork" else Squares()
    for x in DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context=start):
        cut = dc.DistTensor.from_local if start == "fork" else dc.distribute_tensor
        assert cut(x, grid).sum().item() in (96.0, 352.0)  # 16 * (0 + 1 + 2 + 3), and of 4 to 7
    print("read", flush=True)
"""


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_of_a_data_loader_read_however_they_are_started(
    tmp_path: Path, method: str
) -> None:
    end = ended(tmp_path, LOADER, 2, method, "read")
    assert (end.returncode, end.stdout.count("read"), end.stderr) == (0, 2, "")


@pytest.mark.parametrize(
    ("method", "act", "message"),
    [
        ("fork", "raise", "ValueError: unreadable"),
        ("fork", "grid", "was forked from process"),
        ("fork", "tensor", "was forked from process"),
        ("spawn", "grid", "is a worker started by multiprocessing"),
    ],
)
def test_what_a_worker_raises_reaches_its_rank(
    tmp_path: Path, method: str, act: str, message: str
) -> None:
    end = ended(tmp_path, LOADER, 2, method, act)
    assert end.returncode != 0 and "read" not in end.stdout
    assert message in end.stderr and "of 2 raised" in end.stderr


LEFT = """
import os, signal, sys, time
from multiprocessing import get_context
import distconv as dc

def work(file):
    with open(file, "w") as written:
        written.write(f"{os.getpid()}\\n")
    signal.pause()

if __name__ == "__main__":
    file = f"{sys.argv[1]}{dc.ProcessGrid(height=-1).rank}"
    get_context("forkserver").Process(target=work, args=(file,)).start()
    while not (os.path.exists(file) and open(file).read().endswith("\\n")):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_ends_with_the_rank_that_has_started_it(tmp_path: Path) -> None:
    end = ended(tmp_path, LEFT, 1, str(tmp_path / "worker"))
    assert end.returncode != 0
    assert_gone([int((tmp_path / "worker0").read_text())])


FORKS = """
import os
import torch, distconv as dc

grid = dc.ProcessGrid(height=-1)
x = dc.distribute_tensor(torch.arange(64.0).reshape(1, 1, 8, 8), grid)
bodies = {bodies!r}
if grid.rank == 1:
    for body in bodies:
        child = os.fork()
        if child == 0:
            exec(body)
            break
        print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
if grid.rank == 0 or child:
    assert x.sum().item() == 2016.0
    print("whole")
"""

BODIES = {
    "raise ValueError('lost in the child')": "ValueError: lost in the child",
    "x.sum().item()": "was forked from process",
    "dc.ProcessGrid()": "was forked from process",
    "grid.communicator(['height'])": "was forked from process",
    "assert dc.local_box(x.shape, grid).slices[2] == slice(4, 8)": "",
}


def test_a_forked_process_ends_alone(tmp_path: Path) -> None:
    end = ended(tmp_path, FORKS.format(bodies=[*BODIES]), 2)
    assert end.returncode == 0, end.stderr
    statuses = [line.split()[1] for line in end.stdout.splitlines() if line.startswith("status")]
    assert statuses == ["1", "1", "1", "1", "0"] and end.stdout.count("whole") == 2
    for error in {*BODIES.values()}:
        assert end.stderr.count(error) >= [*BODIES.values()].count(error)
    assert "raised" not in end.stderr
