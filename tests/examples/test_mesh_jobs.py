"""Jobs of the mesh-tangling example that go wrong on one rank end with a message, and whole files.

These tests launch jobs of their own.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from distconv.data.checkpoint import checkpoints_in
from distconv.data.durable import read_checksummed
from tests.support.jobs import LIMIT
from tests.support.mesh_runs import arguments, job, launched, write_file

GRID = {"height": 2}

TRUNCATED = """
import os, sys
from mpi4py import MPI
from examples.mesh_tangling import train
from examples.trainer.progress import Progress

def truncating(progress, loss, samples, step=Progress.step):
    if MPI.COMM_WORLD.rank == 0:
        os.truncate(sys.argv[2], 2 ** 16)
    step(progress, loss, samples)

Progress.step = truncating
train.main()
"""

HELP = """
import sys
from mpi4py import MPI
from examples.mesh_tangling import train

if MPI.COMM_WORLD.rank == 1:
    sys.argv.append("--help")
train.main()
"""


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (TRUNCATED, "data.h5: changed while it was read, from"),
        (HELP, "the arguments of rank 1 are"),
    ],
)
def test_a_job_in_which_one_rank_goes_wrong_ends_with_one_message(
    tmp_path: Path, program: str, message: str
) -> None:
    file = tmp_path / "data.h5"
    write_file(file)
    end = launched(program, arguments(file, tmp_path / "run", GRID, 50))
    assert end.returncode == 2, end.stderr
    assert end.stderr.count("error: ") == end.stderr.count(message) == 1
    assert "Traceback" not in end.stderr


TELLING = """
import os, sys
from mpi4py import MPI
from examples.mesh_tangling import train

if MPI.COMM_WORLD.rank == 0:
    with open(sys.argv[2] + ".process", "w") as file:
        file.write(str(os.getpid()))
train.main()
"""


def test_a_run_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    file, output = tmp_path / "data.h5", tmp_path / "run"
    write_file(file)
    with job(TELLING, arguments(file, output, GRID, 10_000)) as process:
        deadline = time.monotonic() + LIMIT
        while not checkpoints_in(output) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(random.uniform(0, 2))
        os.kill(int(Path(f"{file}.process").read_text()), signal.SIGKILL)
        process.communicate(timeout=LIMIT)
        assert process.returncode != 0
    epochs = []
    for path in checkpoints_in(output):
        read_checksummed(path)
        epochs.append(len(torch.load(path, weights_only=True)["extra"]["history"]))
    last = epochs[0]
    # Of three there are moments in which the oldest is not removed yet.
    assert last >= 1 and epochs == [last, last - 1, last - 2][: len(epochs)]
