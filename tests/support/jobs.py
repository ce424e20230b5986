"""Jobs that tests launch, apart from the MPI that the tests themselves may run under."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import forks

SHARED_CORES = {
    "OMP_NUM_THREADS": "1",
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "10",
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
    "TIMER_SLACK": "500000",
}
"""Environment variables for more ranks than cores; see Makefile. Jobs here mostly wait: with sleeps
of 0.5 ms (500,000 ns) in place of 0.05 ms the tests on one rank take 6% less time."""

LIMIT = 100
"""Seconds after which a job counts as hanging."""


def mpiexec() -> str:
    """Return the launcher beside the interpreter, or on PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    launcher = str(beside) if beside.exists() else shutil.which("mpiexec")
    if launcher is None:
        pytest.skip("no mpiexec beside the interpreter or on PATH")
    return launcher


def own_environment(**more: str) -> dict[str, str]:
    """Return the environment of a job, and `more`, without what launchers tell their ranks.

    A `PYTHONPATH` in `more` comes before the one that the tests run with.
    """
    foreign = ("PMI", "MPI", "HYD", "OMPI", "PYTEST", "SLURM", "WORLD_SIZE", "DISTCONV")
    kept = ("DISTCONV_TRANSPORT",)
    environment = {k: v for k, v in os.environ.items() if k in kept or not k.startswith(foreign)}
    paths = filter(None, (more.get("PYTHONPATH"), environment.get("PYTHONPATH")))
    return environment | SHARED_CORES | more | {"PYTHONPATH": os.pathsep.join(paths)}


_FOLDER = tempfile.TemporaryDirectory()
_STARTING = threading.Lock()


def server() -> Path:
    """Start the server of `forks` if needed, and return its address."""
    path = Path(_FOLDER.name, "socket")
    with _STARTING:
        if not path.exists():
            process = subprocess.Popen(
                [sys.executable, forks.__file__, str(path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=own_environment(),
                start_new_session=True,
            )
            limit = time.monotonic() + LIMIT
            while not path.exists():
                assert process.poll() is None and time.monotonic() < limit
                time.sleep(0.05)
    return path


def torchrun(ranks: int, *options: str) -> list[str]:
    """Return the command that starts a script on this number of ranks without MPI."""
    run = [sys.executable, "-S", "-E", *forked(Path(__file__).with_name("torchrun.py"))]
    return [*run, "--standalone", f"--nproc-per-node={ranks}", *options]


def start(
    script: Path, ranks: int = 0, *arguments: str, fresh: bool = True, **more: str
) -> subprocess.Popen[str]:
    """Start a program on this number of ranks, in a session of its own; without MPI for none.

    Each rank is a `fresh` process of its launcher, or else forked, where torch is imported already.
    """
    launcher = [mpiexec(), "-n", str(ranks)] if ranks else []
    program = [str(script)] if fresh else ["-S", "-E", *forked(script)]
    return started([*launcher, sys.executable, *program, *arguments], **more)


def forked(script: Path) -> list[str]:
    """Return the arguments of Python that run a script in a fork with torch imported."""
    return [forks.__file__, str(server()), str(script)]


def started(command: Sequence[str], **more: str) -> subprocess.Popen[str]:
    """Start a command in a session of its own."""
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=own_environment(**more),
        start_new_session=True,
    )


def end_of(
    process: subprocess.Popen[str], limit: float = LIMIT
) -> subprocess.CompletedProcess[str]:
    """Return how a job ends; one that does not is an error."""
    try:
        output, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, errors = process.communicate(timeout=limit)
        pytest.fail(f"the job hangs\n{output}\n{errors}")
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
