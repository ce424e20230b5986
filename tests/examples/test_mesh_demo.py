"""The demo of the mesh-tangling example ends as a whole: no launcher and no rank of it goes on.

These tests launch demos of their own, on small samples, with epochs enough never to finish.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distconv.data.checkpoint import checkpoints_in
from distconv.data.durable import read_checksummed
from tests.support.jobs import LIMIT, start
from tests.support.mesh_runs import REPOSITORY

SCRIPT = """
import sys
from pathlib import Path

from examples.mesh_tangling import demo, generate
from examples.trainer.launch import become_ranks, generated, words

output = Path(sys.argv[1])
samples = {"samples": "8", "size": "64"}
files = generated(output, generate.main, {"data": samples, "validation": samples})
small = {"network": "1k", "width": "0.02", "grid": "height=2", "epochs": "10000"}
options = demo.TRAIN | small | files | {"output": str(output)}
become_ranks(2, "examples.mesh_tangling.train", words(options))
"""
RANKS = 2


def processes_of(folder: Path) -> list[int]:
    """Return the running processes that have a path in `folder` on their command lines."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            named = os.fsencode(folder) in (process / "cmdline").read_bytes()
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it has just ended
            continue
        if named and state != "Z":
            found.append(int(process.name))
    return found


def ranks_import(folder: Path) -> bool:
    """Return whether launcher and ranks have been started."""
    return len(processes_of(folder)) > RANKS


def ranks_train(folder: Path) -> bool:
    """Return whether the first checkpoint is there."""
    return bool(checkpoints_in(folder / "run"))


@pytest.mark.timeout(3 * LIMIT)
@pytest.mark.parametrize(
    ("moment", "sent"), [(ranks_import, signal.SIGKILL), (ranks_train, signal.SIGINT)]
)
def test_what_ends_the_demo_ends_its_ranks_and_leaves_a_whole_checkpoint(
    tmp_path: Path, moment: Callable[[Path], bool], sent: signal.Signals
) -> None:
    script, output = tmp_path / "demo.py", tmp_path / "run"
    script.write_text(SCRIPT)
    demo = start(script, 0, str(output), PYTHONPATH=str(REPOSITORY))
    try:
        limit = time.monotonic() + LIMIT
        while not moment(tmp_path):
            assert demo.poll() is None and time.monotonic() < limit
            time.sleep(0.05)
        if sent == signal.SIGINT:
            os.killpg(demo.pid, sent)  # as Ctrl-C does
        else:
            demo.send_signal(sent)
        limit = time.monotonic() + LIMIT
        while processes_of(tmp_path) and time.monotonic() < limit:
            demo.poll()
            time.sleep(0.05)
        assert not processes_of(tmp_path)
        assert demo.wait() != 0
    finally:
        for process in processes_of(tmp_path):
            os.kill(process, signal.SIGKILL)
        demo.communicate()
    if moment is ranks_train:
        assert checkpoints_in(output)
        for path in checkpoints_in(output):
            read_checksummed(path)
