"""Wrong launches are errors: several processes, each of which MPI takes for the only one."""

from __future__ import annotations

import os
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

import distconv
from distconv.transport import launch
from distconv.transport.launch import (
    check_launch,
    keep_launcher_from_children,
    launched,
    switched_on,
)
from tests.support.jobs import end_of, start

SRUN = {"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"WORLD_SIZE": "4", "RANK": "2"},
            "WORLD_SIZE=4 declares .* RANK, MASTER_ADDR and MASTER_PORT, .* not all set",
        ),
        ({"PMI_SIZE": "2"}, "PMI_SIZE=2 .* MPICH .* start the program with the mpiexec -n 2"),
        ({"OMPI_COMM_WORLD_SIZE": "8"}, "OMPI_COMM_WORLD_SIZE=8 .* Open MPI"),
        (SRUN, "SLURM_STEP_NUM_TASKS=4 .* srun --mpi=pmix"),
        ({"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}, "SLURM_NTASKS=4 .* srun --mpi=pmix"),
        ({"WORLD_SIZE": "4", "PMI_SIZE": "1"}, "WORLD_SIZE=4"),
        ({"WORLD_SIZE": "4", "DISTCONV_ALLOW_SINGLE": "0"}, "set DISTCONV_ALLOW_SINGLE=1"),
    ],
)
def test_several_processes_of_which_mpi_knows_one_are_an_error(
    environment: dict[str, str], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        check_launch(1, environment)
    check_launch(4, environment)
    check_launch(1, environment | {"DISTCONV_ALLOW_SINGLE": "1"})


def test_ranks_of_mpi_are_told_of_mpi4py_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(RuntimeError, match=r"pip install 'distconv\[mpich\]'.* torchrun"):
        check_launch(1, {"PMI_SIZE": "2"})


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WORLD_SIZE": "1", "PMI_SIZE": "1"},
        {"WORLD_SIZE": "many"},
        # The shell of an allocation, its batch script, and its interactive step.
        {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"},
        {"SLURM_NTASKS": "4", "SLURM_STEP_ID": "4294967291"},
        SRUN | {"SLURM_STEP_ID": "4294967290"},
        # srun -n 1 within it, and MPI's own launcher within an srun.
        {"SLURM_NTASKS": "4", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "1"},
        SRUN | {"PMI_SIZE": "1"},
        SRUN | {"OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_one_process_on_purpose_is_no_error(environment: dict[str, str]) -> None:
    check_launch(1, environment)


def test_words_for_no_switch_a_variable_off() -> None:
    off = "", "0", "false", "No", "OFF", None
    found = [switched_on("X", {} if word is None else {"X": word}) for word in (*off, "1", "yes")]
    assert found == [False] * len(off) + [True] * 2


def test_the_number_of_tasks_is_that_of_the_step() -> None:
    assert launched(SRUN | {"SLURM_NTASKS": "64"}) == {"SLURM_STEP_NUM_TASKS": 4}


PROGRAM = """
import distconv as dc
from mpi4py import MPI
dc.ProcessGrid(MPI.COMM_SELF)
print(dc.ProcessGrid())
"""


def test_the_grid_of_a_wrong_launch_is_an_error_and_that_of_one_rank_is_not(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    end = end_of(start(script, fresh=False, WORLD_SIZE="2"))
    assert end.returncode == 1 and "WORLD_SIZE=2 declares 2 ranks" in end.stderr
    end = end_of(start(script, fresh=False, WORLD_SIZE="2", DISTCONV_ALLOW_SINGLE="1"))
    assert (end.returncode, end.stdout) == (0, "ProcessGrid() on 1 rank\n"), end.stderr


EARLY = """
import os
import distconv as dc
if os.environ["PMI_RANK"] == "1":
    raise ValueError("before there is a grid")
dc.ProcessGrid(height=-1)
"""


def test_an_error_of_one_rank_before_mpi_has_started_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(EARLY)
    end = end_of(start(script, 2))
    assert end.returncode != 0 and "distconv: rank 1 of 2 raised" in end.stderr
    assert end.stderr.count("ValueError: before there is a grid") == 1
    assert end.returncode == 1 and "Killed (signal 9)" not in end.stdout + end.stderr


UNSTARTED = """
import mpi4py
mpi4py.rc.initialize = False
import distconv as dc
try:
    dc.ProcessGrid(height=-1)
except RuntimeError as error:
    print(error)
from mpi4py import MPI
MPI.Init_thread()
x = dc.distribute_tensor(__import__("torch").ones(1, 1, 8, 8), dc.ProcessGrid(height=-1))
print(x.sum().item())
MPI.Finalize()
for use in (lambda: dc.ProcessGrid(height=-1), lambda: dc.ProcessGrid(width=-1), x.sum):
    try:
        use()
    except RuntimeError as error:
        print(error)
"""


def test_mpi_that_does_not_run_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNSTARTED)
    end = end_of(start(script, 2))
    assert end.returncode == 0, end.stderr
    assert end.stdout.count("mpi4py.rc.initialize is False; call MPI.Init_thread() on every") == 2
    assert end.stdout.count("64.0") == 2
    assert end.stdout.count("MPI has ended, by MPI.Finalize(); use grids before") == 6


SPAWNED = """
from mpi4py import MPI
import multiprocessing
import distconv as dc

def work(_):
    try:
        dc.ProcessGrid(height=-1)
    except RuntimeError as error:
        return str(error)

if __name__ == "__main__":
    for _ in range(2):  # before the first grid, and after it
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(*pool.map(work, [0]))
        assert dc.ProcessGrid(height=-1).size == 2
"""


def test_spawned_workers_of_a_script_that_imports_mpi4py_do_not_end_the_job(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPAWNED)
    end = end_of(start(script, 2))
    assert end.returncode == 0, end.stderr
    assert end.stdout.count("is a worker started by multiprocessing") == 4


@pytest.mark.parallel([1, 2])
def test_spawned_workers_get_no_connection_to_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PMI_FD", "PMIX_NAMESPACE", "PMIX_SERVER_URI41", "PMIX_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")  # by which a worker is known to be one
    distconv.ProcessGrid(height=-1)
    keep_launcher_from_children()  # as the first grid of a process does
    left = [name for name in os.environ if name.startswith(("PMI", "OMPI_COMM_WORLD_RANK"))]
    assert "OMPI_COMM_WORLD_RANK" in left and not {"PMI_FD", "PMIX_RANK"} & {*left}
    assert not any(name.startswith("PMIX_") for name in left)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"SLURM_NTASKS": "4"}, "SLURM_NTASKS=4 tasks; .* srun -n 4, or set DISTCONV_ALLOW_SIN"),
        (SRUN | {"SLURM_STEP_ID": "4294967291"}, "SLURM_NTASKS=4 tasks"),
        ({"FLUX_JOB_SIZE": "8"}, "FLUX_JOB_SIZE=8 tasks"),
        ({}, None),
        ({"SLURM_NTASKS": "1"}, None),
        ({"SLURM_NTASKS": "4", "DISTCONV_ALLOW_SINGLE": "1"}, None),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, None),
    ],
)
def test_one_rank_in_a_job_of_several_tasks_warns(
    environment: dict[str, str], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = launch.notice_of_tasks(1, environment)
    assert re.search(message, found or "") if message else found is None
    assert launch.notice_of_tasks(4, environment) is None
    for name in [name for name in os.environ if name.startswith(("SLURM", "PMI", "OMPI", "WORLD"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        distconv.ProcessGrid()
    assert len(warned) == (message is not None)


HIDDEN = """
import sys
import torch, distconv as dc
x = dc.distribute_tensor(torch.ones(2, 2, 8, 8), dc.ProcessGrid(height=-1))
net = torch.nn.Sequential(torch.nn.MaxPool2d(99))
if "plain" in sys.argv:
    x = x.full_tensor()
net(x)
"""


@pytest.mark.parametrize("ranks", [0, 2])
def test_errors_show_the_programs_lines_alone_unless_debugging(tmp_path: Path, ranks: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(HIDDEN)
    end = end_of(start(script, ranks, fresh=False))
    files = re.findall(r'File "(.*)", line', end.stderr)
    assert end.returncode == 1 and "RuntimeError: Given input size" in end.stderr
    assert files[-1] == str(script) and "net(x)" in end.stderr
    assert "site-packages" not in end.stderr and "distconv/ops" not in end.stderr
    end = end_of(start(script, ranks, fresh=False, DISTCONV_DEBUG="1"))
    assert end.returncode == 1 and "distconv/tensor/dist_tensor.py" in end.stderr


def test_errors_of_other_libraries_keep_their_frames(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HIDDEN)
    end = end_of(start(script, 0, "plain", fresh=False))
    assert end.returncode == 1 and "torch/nn/modules/pooling.py" in end.stderr


@pytest.mark.parametrize(
    ("mebibytes", "rank", "said"), [(3, 0, True), (3, 1, False), (8, 0, False)]
)
def test_too_little_shared_memory_is_named_before_mpi_dies_of_it(
    mebibytes: int,
    rank: int,
    said: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launch.time, "sleep", lambda _: None)

    def usage(_: str) -> SimpleNamespace:
        return SimpleNamespace(free=mebibytes * 2**20)

    monkeypatch.setattr(launch, "_SHARED", str(tmp_path))
    monkeypatch.setattr(launch.shutil, "disk_usage", usage)
    launch._warn_of_little_memory({"MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": str(rank)})
    printed = capsys.readouterr().err
    assert ("3.0 MiB free, and MPICH needs about 4.0 MiB there for 4 ranks" in printed) == said
