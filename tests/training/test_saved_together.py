"""Workers and servers that save together go on as if they had never been interrupted."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.jobs import end_of, start
from tests.support.torch_ranks import start_ranks

PROGRAM = """
import os, sys, time
from functools import partial
import torch, distconv as dc
from distconv.training import AsynchronousElastic, Downpour, Team, Worker, serve

folder, method, servers, interrupted = sys.argv[1:]
Adam, SGD = partial(torch.optim.Adam, lr=0.01), partial(torch.optim.SGD, lr=0.01, momentum=0.9)
method, optimizer = {
    "downpour": (Downpour(Adam, push=2, fetch=2), Adam),
    "seldom": (Downpour(SGD, push=1, fetch=3), SGD),
    "elastic": (AsynchronousElastic(2), SGD),
}[method]
torch.manual_seed(0)
nn = torch.nn
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 1, 3)).double()
team = Team(servers=int(servers))
saved = team.last_saved(folder)
if team.serves:
    print(serve(team, model, method, folder=folder, save_every=None, resume=saved or False).updates)
else:
    dc.parallelize(model, team.grid)
    own = optimizer(model.parameters()) if optimizer else None
    with Worker(team, model, method, own) as worker:
        first = worker.load(saved).extra["epoch"] if saved else 0
        print(f"from epoch {first}")
        for epoch in range(first, 3):
            for number in range(5):
                if interrupted == "yes" and (epoch, number) == (1, 3):
                    os.kill(os.getpid(), 9)
                torch.manual_seed(10 * epoch + number)
                x = dc.distribute_tensor(torch.rand(2, 1, 8, 8).double(), team.grid)
                model(x).square().mean().backward()
                worker.step(2)
            worker.save(folder, epoch + 1, extra={"epoch": epoch + 1})
        print([p.tolist() for p in model.state_dict().values()])
        with worker.center():
            print([p.tolist() for p in model.state_dict().values()], worker.steps, worker.samples)
"""


def run(
    script: Path, folder: Path, method: str, servers: int, interrupted: str, mpi: bool
) -> list[subprocess.CompletedProcess[str]]:
    """Run the program with one worker, by mpiexec or rank by rank; return how they end."""
    words = str(folder), method, str(servers), interrupted
    ranks = servers + 1
    jobs = (
        [start(script, ranks, *words, fresh=False)] if mpi else start_ranks(script, ranks, *words)
    )
    return [end_of(job) for job in jobs]


@pytest.mark.parametrize(("method", "servers", "mpi"), [("seldom", 2, True), ("elastic", 1, False)])
def test_an_interrupted_worker_goes_on_with_the_same_numbers(
    tmp_path: Path, method: str, servers: int, mpi: bool
) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    straight = run(script, tmp_path / "straight", method, servers, "no", mpi)
    assert not any(end.returncode for end in straight), [end.stderr for end in straight]
    assert any(end.returncode for end in run(script, tmp_path / "run", method, servers, "yes", mpi))
    again = run(script, tmp_path / "run", method, servers, "no", mpi)
    assert not any(end.returncode for end in again), [end.stderr for end in again]
    assert "from epoch 1" in again[-1].stdout
    expected, found = (
        "".join(end.stdout for end in ends).splitlines() for ends in (straight, again)
    )
    assert sorted(found) == sorted(["from epoch 1", *(x for x in expected if x != "from epoch 0")])


def test_servers_say_how_workers_can_save(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.replace("save_every=None", "save_every=7"))
    ends = run(script, tmp_path / "run", "downpour", 1, "no", False)
    assert all(end.returncode for end in ends)
    for end in ends:
        message = "Worker.save(1): the server saves in every 7-th update; call serve with a folder"
        assert message in end.stderr, end.stderr
