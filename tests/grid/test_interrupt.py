"""Ctrl-C and a killed launcher end all ranks, wherever they are."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.jobs import LIMIT, end_of, start

SCRIPT = """
import os, resource, signal, time
import torch, distconv as dc

resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
grid = dc.ProcessGrid(height=-1)

def wait():
    "Wait in MPI, where Python raises no KeyboardInterrupt."
    grid.comm.recv(source=1 - grid.rank, tag=9)

def ready():
    name = os.path.join(os.path.dirname(__file__), str(grid.rank))
    with open(name + ".partial", "w") as file:
        file.write(f"{os.getpid()} {os.getppid()}")
    os.rename(name + ".partial", name)

"""

WAITING = "ready(); wait()"
CAUGHT = """
try:
    ready()
    while True: time.sleep(0.1)
except KeyboardInterrupt:
    print("caught", flush=True)
wait()
"""
CAUGHT_BY_ONE = """
try:
    ready()
    if grid.rank: wait()
    while True: time.sleep(0.1)
except KeyboardInterrupt:
    print("caught", flush=True)
"""


def started(
    tmp_path: Path, body: str, fresh: bool = True
) -> tuple[subprocess.Popen[str], list[int], int]:
    """Start a job of two ranks; when they are ready, return it, their processes and parent."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + body)
    process = start(script, 2, fresh=fresh)
    files = [tmp_path / "0", tmp_path / "1"]
    limit = time.monotonic() + LIMIT
    while not all(file.exists() for file in files):
        assert process.poll() is None and time.monotonic() < limit, end_of(process, 1)
        time.sleep(0.1)
    (first, parent), (second, _) = (map(int, file.read_text().split()) for file in files)
    return process, [first, second], parent


def gone(process: int) -> bool:
    """Return whether a process has ended, though nobody may have asked for its status."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def assert_gone(processes: list[int]) -> None:
    """Fail where a process is still running, and end it."""
    limit = time.monotonic() + LIMIT
    while time.monotonic() < limit and not all(map(gone, processes)):
        time.sleep(0.1)
    left = [process for process in processes if not gone(process)]
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert not left


def interrupted(tmp_path: Path, body: str) -> None:
    job, ranks, _ = started(tmp_path, body, fresh=False)
    job.send_signal(signal.SIGINT)
    end = end_of(job)
    assert end.returncode != 0 and "s after an interrupt" in end.stderr
    assert_gone(ranks)


def an_interrupt_ends_ranks_that_have_caught_it(tmp_path: Path) -> None:
    interrupted(tmp_path, CAUGHT)


def an_interrupt_ends_ranks_that_wait_for_one_that_has_caught_it(tmp_path: Path) -> None:
    interrupted(tmp_path, CAUGHT_BY_ONE)


def an_interrupt_ends_ranks_that_wait_and_their_processes(tmp_path: Path) -> None:
    body = """
child = os.fork()
if child == 0:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(600)
    os._exit(0)
open(f"{os.path.dirname(__file__)}/child{grid.rank}", "w").write(str(child))
grid.comm.Barrier()
ready()
wait()
"""
    job, ranks, _ = started(tmp_path, body)
    children = [int((tmp_path / f"child{rank}").read_text()) for rank in range(2)]
    job.send_signal(signal.SIGINT)
    end = end_of(job)
    assert end.returncode != 0 and "s after an interrupt" in end.stderr
    assert_gone(ranks + children)


def a_program_with_a_handler_of_its_own_decides_for_itself(tmp_path: Path) -> None:
    body = """
from distconv.grid import abort
asked = []
signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
ready()
while not asked: time.sleep(0.1)
time.sleep(abort.PATIENCE + 2)
grid.comm.Barrier()
print("saved", flush=True)
"""
    job, _, _ = started(tmp_path, body, fresh=False)
    job.send_signal(signal.SIGINT)
    end = end_of(job)
    assert end.returncode == 0 and end.stdout.count("saved") == 2


def a_killed_launcher_leaves_no_ranks(tmp_path: Path) -> None:
    job, ranks, _ = started(tmp_path, WAITING)
    job.kill()
    assert_gone(ranks)
    end_of(job)


def ranks_end_when_what_has_started_them_is_killed(tmp_path: Path) -> None:
    job, ranks, parent = started(tmp_path, WAITING)
    os.kill(parent, signal.SIGKILL)
    assert_gone(ranks)
    assert end_of(job).returncode != 0


def an_interrupt_of_a_worker_is_not_one_of_its_rank(tmp_path: Path) -> None:
    body = """
from distconv.grid import abort
child = os.fork()
if child == 0:
    try: time.sleep(60)
    except KeyboardInterrupt: os._exit(7)
ready()
time.sleep(1)
os.kill(child, signal.SIGINT)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
time.sleep(abort.PATIENCE + 2)
print("whole", flush=True)
"""
    job, _, _ = started(tmp_path, body, fresh=False)
    end = end_of(job)
    assert end.returncode == 0 and end.stdout.count("whole") == 2, end.stderr


BEHAVIOURS = {
    behaviour.__name__: behaviour
    for behaviour in (
        an_interrupt_ends_ranks_that_have_caught_it,
        an_interrupt_ends_ranks_that_wait_for_one_that_has_caught_it,
        an_interrupt_ends_ranks_that_wait_and_their_processes,
        a_program_with_a_handler_of_its_own_decides_for_itself,
        a_killed_launcher_leaves_no_ranks,
        ranks_end_when_what_has_started_them_is_killed,
        an_interrupt_of_a_worker_is_not_one_of_its_rank,
    )
}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[None]]]:
    """Run all behaviours, a few at the same time, as they mostly wait."""
    with ThreadPoolExecutor(3) as pool:
        yield {
            name: pool.submit(behaviour, tmp_path_factory.mktemp("job"))
            for name, behaviour in BEHAVIOURS.items()
        }


@pytest.mark.timeout(600)
@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_ranks_end_together(shown: dict[str, Future[None]], behaviour: str) -> None:
    shown[behaviour].result()
