"""A worker that is lost is dropped, and a lost server ends the job with its state on disk."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distconv.data.checkpoint import checkpoints_in
from distconv.training import server_state
from tests.support.jobs import end_of, start
from tests.support.killed_workers import PATIENCE, PROGRAM, begin, program

HANGING = """
class Hanging(torch.optim.SGD):
    steps = 0
    def step(self):
        Hanging.steps += 1
        while Hanging.steps == 3 and not os.path.exists(folder + ".released"):
            time.sleep(0.1)
        super().step()
"""
"""An optimizer that lets a server hang in its third update, for as long as the test likes."""

MEETING = """
        open(f"{folder}.begun-{team.worker}-{team.grid.rank}", "w").close()
        while len(glob.glob(folder + ".begun-*")) < 2 * team.grid.size:
            time.sleep(0.01)
"""
"""Lets both workers begin before either takes a step, so that the server hangs for both alike."""

LOSS = """
            while act != "-" and step == steps - 2 and not os.path.exists(folder + ".killed"):
                time.sleep(0.01)
"""
"""Lets a worker wait before its last step for the server to be killed."""

KILLED = "os.kill(os.getpid(), 9)"
SECOND = f"if team.grid.rank == 1: {KILLED}"
GONE = "sys.exit(3)"


SILENT = re.compile(
    "ServerLost: waited for the parameters after its gradients for more than "
    f"DISTCONV_TIMEOUT={PATIENCE} seconds at .*program.py:[0-9]+: rank 0 has not answered"
)


def hanging() -> str:
    text = PROGRAM.replace("SGD = partial", "import glob\n" + HANGING + "SGD = partial")
    text = text.replace("        first = worker.steps\n", "        first = worker.steps" + MEETING)
    assert HANGING in text and MEETING in text
    return text.replace("Downpour(SGD", "Downpour(partial(Hanging, lr=0.01)")


@pytest.mark.parametrize(
    ("method", "height", "act"), [("synchronous", 1, KILLED), ("downpour", 2, SECOND)]
)
def test_the_others_go_on_without_a_worker_that_is_lost(
    tmp_path: Path, method: str, height: int, act: str
) -> None:
    ends = [end_of(process) for process in begin(tmp_path, method, 12, act, height=height)]
    report = "".join(end.stdout + end.stderr for end in ends)
    codes = [end.returncode for end in ends]
    assert not any(codes[: 1 + height]) and all(codes[1 + height :]), report
    # 12 of the one worker, 3 of the other, or 4 where it had only just lost its second rank.
    assert ends[0].stdout in ("served 15 samples, lost 1\n", "served 16 samples, lost 1\n"), report
    assert "client 1 is dropped" in ends[0].stderr
    assert "worker 0 took 12 steps" in ends[1].stdout


def test_a_lost_server_ends_the_job_which_goes_on_from_its_state(tmp_path: Path) -> None:
    # The server says who it is, and saves each update.
    note = "if team.serves:\n    open(folder + '.pid', 'w').write(str(os.getpid()))"
    text = PROGRAM.replace("save_every=5", "save_every=1").replace("if team.serves:", note, 1)
    # The other worker does not end before.
    text = text.replace("            worker.step()\n", "            worker.step()" + LOSS)
    act = "os.kill(int(open(folder + '.pid').read()), 9); open(folder + '.killed', 'w').close()"
    ends = [end_of(process) for process in begin(tmp_path, "downpour", 12, act, text=text)]
    assert all(end.returncode for end in ends)
    for end in ends[1:]:
        assert "ServerLost: the server has ended: rank 0 is lost" in end.stderr
    newest = checkpoints_in(tmp_path / "state" / "server-0")[0]
    saved = int(newest.stem.split("-")[1])
    # The answer to the third update leaves before that is saved.
    assert 2 <= saved <= 15 and len(server_state(tmp_path / "state")) == 4
    ends = [end_of(process) for process in begin(tmp_path, "downpour", 12)]
    assert not any(end.returncode for end in ends), [end.stderr for end in ends]
    assert "served 24 samples, lost 0" in ends[0].stdout
    assert sum(int(end.stdout.split("from ")[1]) for end in ends[1:]) == saved


def test_when_all_workers_are_lost_the_server_saves_and_raises(tmp_path: Path) -> None:
    text = PROGRAM.replace("team.worker == 1 and", "")
    ends = [end_of(process) for process in begin(tmp_path, "downpour", 12, KILLED, text=text)]
    assert all(end.returncode for end in ends)
    assert "AllWorkersLost: all workers are lost: client" in ends[0].stderr
    newest = checkpoints_in(tmp_path / "state" / "server-0")[0]
    assert newest.stem.endswith("-0000000006")


@pytest.mark.parametrize("act", [KILLED, GONE])
def test_under_mpiexec_a_job_ends_with_a_worker_that_is_lost(tmp_path: Path, act: str) -> None:
    words = str(tmp_path / "state"), "synchronous", "12", "1", act, "-1", "0"
    job = start(program(tmp_path), 3, *words, fresh=False, DISTCONV_TIMEOUT=PATIENCE)
    end = end_of(job)
    assert end.returncode
    # Who ends by itself tells the server, and leaves the others alone.
    assert ("served 15 samples, lost 1" in end.stdout) == (act == GONE), end.stderr


def test_workers_do_not_wait_for_a_server_that_hangs(tmp_path: Path) -> None:
    ranks = begin(tmp_path, "downpour", 12, height=2, text=hanging())
    ends = [end_of(process) for process in ranks[1:]]
    (tmp_path / "state.released").touch()
    assert end_of(ranks[0]).returncode
    assert all(end.returncode for end in ends)
    for end in ends:
        assert SILENT.search(end.stderr), end.stderr
