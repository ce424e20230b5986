"""Ranks that wait for each other in vain end within a limit, with one message that says where.

These tests launch jobs of their own.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.grid.test_abort import job

SET_UP = """
import threading
from torch import nn
F = torch.nn.functional
one = grid.rank == 1
small = dc.distribute_tensor(torch.arange(256.0).reshape(1, 1, 16, 16), grid)
model = dc.parallelize(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2)), grid)
def train(batches):
    for _ in range(batches):
        model(small).square().mean().backward()
train(1)
"""

HANGS = {
    "a rank exits": "if one: sys.exit()\ntrain(1)",
    "a rank returns early": "if not one: train(1)",
    "a rank raises in a thread": """
def work():
    for i in range(3):
        if one and i == 1: raise ValueError('lost')
        train(1)
thread = threading.Thread(target=work)
thread.start()
thread.join()
""",
    "a rank catches an error": """
try:
    if one: raise ValueError('lost')
    train(1)
except ValueError:
    pass
small.sum()
""",
    "a rank skips a call": "if not one: small.sum()\ntrain(1)",
    "a rank adds a call": "if one: F.avg_pool2d(small, 3, 1, 1)\nsmall.sum()",
    "a rank calls in another order": """
for call in [F.avg_pool2d, F.max_pool2d][:: -1 if one else 1]:
    call(small, 3, 1, 1)
train(1)
""",
    "a rank pads otherwise": "F.avg_pool2d(small, 3, 1, (0, 1) if one else (1, 1)).sum()\ntrain(1)",
    "a rank asks for the state of sharded weights alone": """
grid = dc.ProcessGrid(channel=2)
wide = dc.parallelize(nn.Conv2d(4, 4, 1), grid, shard_parameters=True)
if one: dc.full_state_dict(wide)
train(1)
""",
    "a rank has a block of another shape, and catches the error": """
try:
    dc.DistTensor.from_local(torch.zeros(1, 1, 2 + 2 * one, 1), grid)
    F.avg_pool2d(small, 3, 1, 1)
except ValueError:
    if not one: raise SystemExit
train(1)
""",
    "a rank asks for the whole tensor alone": "if one: small.full_tensor()\ntrain(1)",
    "a rank makes a grid alone": "if one: dc.ProcessGrid(width=-1)\ntrain(1)",
    "a rank has fewer batches": "train(2 if one else 3)",
    "a rank meets a class that is not there, and catches it": """
labels = torch.zeros(1, 16, 16, dtype=torch.long)
labels[0, 15, 15] = 7
try:
    F.cross_entropy(model(small), labels)
except (IndexError, RuntimeError):
    pass
train(1)
""",
    "a rank computes for too long": "if one: __import__('time').sleep(1000)\ntrain(1)",
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all hanging jobs, several at a time, as they mostly wait; return how each ended."""

    folders = [tmp_path_factory.mktemp("job") for _ in HANGS]

    def end(body: str) -> Any:
        return job(folders.pop(), SET_UP + body, DISTCONV_TIMEOUT="4")

    with ThreadPoolExecutor(8) as pool:
        return dict(zip(HANGS, pool.map(end, HANGS.values()), strict=True))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", HANGS)
def test_a_hang_ends_with_one_message(ends: dict[str, Any], what: str) -> None:
    end = ends[what]
    assert end.returncode != 0, end.stderr
    # On a busy machine another rank tells too of an error that all share, and a comparison may find
    # the difference in the moment in which the limit ends the wait.
    waits = set(re.findall("distconv: ranks wait.*", end.stderr))
    differ = set(re.findall("the ranks differ.*", end.stderr))
    assert waits or differ, end.stderr
    assert len(waits) <= 1 and len(differ) <= 1, end.stderr
    assert "rank 0" in end.stderr and "rank 1" in end.stderr and "script.py:" in end.stderr


FULL = """
import os
ours, full = os.pipe()
os.set_blocking(full, False)
try:
    while True: os.write(full, b"x" * 4096)
except BlockingIOError:
    os.set_blocking(full, True)
"""

HINDRANCES = {
    "standard error is closed": "os.close(2)",
    "standard error is full": FULL + "os.dup2(full, 2)",
    "standard output is full": FULL
    + "os.dup2(full, 1); kept = os.fdopen(full, 'w'); kept.write('text in a buffer')",
    "standard error is broken": "ours, full = os.pipe(); os.close(ours); os.dup2(full, 2)",
    "sys.stderr is closed": "sys.stderr.close(); sys.__stderr__.close()",
    "no thread can be had": """
def start(thread): raise RuntimeError("can't start new thread")
threading.Thread.start = start
""",
    "atexit waits, and no thread can be had": """
def start(thread): raise RuntimeError("can't start new thread")
threading.Thread.start = start
import atexit
atexit.register(time.sleep, 1000)
""",
    "the folder is gone": "os.chdir(sys.argv[1]); os.rmdir(sys.argv[1])",
    "there is no hook": "del sys.excepthook",
    "no file can be waited for": """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (0, 4096))
""",
}


def test_nothing_keeps_the_watching_thread_from_ending_the_job(tmp_path: Path) -> None:
    def end(i: int, hindrance: str) -> Any:
        folder = tmp_path / str(i)
        (folder / "gone").mkdir(parents=True)
        body = hindrance.replace("sys.argv[1]", repr(f"{folder}/gone"))
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        text = f"import time\n{SET_UP}\nif not one:\n{lines}\nelse: time.sleep(1000)\nsmall.sum()"
        return job(folder, text, DISTCONV_TIMEOUT="4")

    with ThreadPoolExecutor(4) as pool:
        ends = dict(zip(HINDRANCES, pool.map(end, range(99), HINDRANCES.values()), strict=True))
    for what, ended in ends.items():
        assert ended.returncode != 0, what
        told = "ranks wait for more than DISTCONV_TIMEOUT=4 seconds" in ended.stderr
        assert told or what.startswith(("standard error", "no file")), (what, ended.stderr)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_others_end_where_rank_0_has_stopped(tmp_path: Path, ranks: int) -> None:
    body = "if not grid.rank: os.kill(os.getpid(), signal.SIGSTOP)\nsmall.sum()"
    end = job(tmp_path, SET_UP + body, ranks, DISTCONV_TIMEOUT="4")
    assert end.returncode != 0 and end.stderr.count("distconv: ranks wait for more than") == 1
    assert (
        "rank 1: waiting for" in end.stderr
        and "cannot be reached, because one of them" in end.stderr
    )


def test_the_message_names_operators_and_lines_of_all_ranks(tmp_path: Path) -> None:
    body = """
import time
weight = torch.ones(1, 1, 3, 3)
for i in range(17):
    if one and i == 16: time.sleep(1000)
    F.conv2d(small, weight, padding=1)
"""
    end = job(tmp_path, SET_UP + body, ranks=3, DISTCONV_TIMEOUT="4")
    assert "ranks wait for more than DISTCONV_TIMEOUT=4 seconds" in end.stderr
    assert "ranks 0, 2: waiting" in end.stderr and ".conv2d at" in end.stderr
    assert "rank 1: elsewhere at" in end.stderr


def test_the_message_names_an_error_that_one_rank_has_met_and_caught(ends: dict[str, Any]) -> None:
    said = ends["a rank meets a class that is not there, and catches it"].stderr
    assert re.search(r"Errors differ\. .*rank 1: .*7.* in .*cross_entropy at .*script.py:\d+", said)


@pytest.mark.parametrize("body", ["train(1)", "dc.save_checkpoint('run', model)"])
def test_a_rank_that_leaves_is_noticed_long_before_the_limit(tmp_path: Path, body: str) -> None:
    end = job(tmp_path, SET_UP + f"if one: sys.exit()\n{body}")
    assert end.returncode != 0
    assert "ranks wait for rank 1, which has left the program" in end.stderr
    assert "rank 1: has left the program" in end.stderr


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_have_taken_different_steps_end_long_before_the_limit(
    tmp_path: Path, ranks: int
) -> None:
    body = """
for step in range(200):
    F.avg_pool2d(small, 3, 1, 1) if one and step == 150 else small.sum()
"""
    end = job(tmp_path, SET_UP + body, ranks)
    assert end.returncode != 0
    assert "ranks wait in vain: they ran different steps" in end.stderr
    [told] = [line for line in end.stderr.splitlines() if "first in which they differ" in line]
    assert "avg_pool2d" in told and "sum" in told


def test_ranks_that_leave_at_different_times_without_need_end_in_silence(tmp_path: Path) -> None:
    end = job(tmp_path, SET_UP + "if one: __import__('time').sleep(4)")
    assert (end.returncode, end.stderr) == (0, "")


def test_a_limit_that_is_no_number_is_an_error(tmp_path: Path) -> None:
    end = job(tmp_path, "", DISTCONV_TIMEOUT="soon")
    assert end.returncode != 0 and "DISTCONV_TIMEOUT='soon'" in end.stderr
