"""Runs of a server and two workers of two ranks, of which one rank is killed at a random moment.

`python -m tests.support.killed_workers 20` makes 20 of them, and says how each has ended; `make
nightly` does. Where one hangs, that is an error.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.jobs import end_of
from tests.support.torch_ranks import start_ranks

PROGRAM = """
import os, sys, threading, time
from functools import partial
import torch, distconv as dc
from distconv.training import AsynchronousElastic, Downpour, Team, Worker, serve

begun = time.monotonic()
folder, method, steps, height, act, dying, after = sys.argv[1:]
steps = int(steps)
if dying == os.environ.get("RANK"):
    timer = threading.Timer(float(after), os.kill, (os.getpid(), 9))
    timer.daemon = True
    timer.start()
SGD = partial(torch.optim.SGD, lr=0.01)
method = {"downpour": Downpour(SGD), "synchronous": Downpour(SGD, synchronous=True),
          "elastic": AsynchronousElastic()}[method]
torch.manual_seed(0)
Conv2d = partial(torch.nn.Conv2d, kernel_size=3, padding=1)
model = torch.nn.Sequential(Conv2d(1, 4), Conv2d(4, 1))
team = Team(height=int(height))
if team.serves:
    report = serve(team, model, method, folder=folder, save_every=5, resume=True)
    print(f"served {report.samples} samples, lost {len(report.lost)}")
else:
    dc.parallelize(model, team.grid)
    x = dc.distribute_tensor(torch.rand(1, 1, 8, 8), team.grid)
    with Worker(team, model, method, SGD(model.parameters())) as worker:
        first = worker.steps
        for step in range(first, steps):
            model(x).square().mean().backward()
            if act != "-" and team.worker == 1 and step == 3:
                exec(act)
            worker.step()
    print(time.monotonic() - begun)
    print(f"worker {team.worker} took {worker.steps} steps, from {first}")
"""

PATIENCE = "10"
"""Seconds that ranks wait for one that does not come."""


def program(folder: Path, text: str = PROGRAM) -> Path:
    """Write the program into a folder."""
    path = folder / "program.py"
    path.write_text(text)
    return path


def begin(
    folder: Path,
    method: str,
    steps: int,
    act: str = "-",
    *,
    height: int = 1,
    dying: tuple[int, float] = (-1, 0.0),
    text: str = PROGRAM,
) -> list[subprocess.Popen[str]]:
    """Start a server and two workers, of which each rank lives by itself.

    Parameters
    ----------
    act: what worker 1 does in its fourth step.
    height: the ranks of a worker.
    dying: a rank that kills itself so many seconds after its imports.
    text: of the program.
    """
    words = str(folder / "state"), method, str(steps), str(height), act, *map(str, dying)
    return start_ranks(program(folder, text), 1 + 2 * height, *words, DISTCONV_TIMEOUT=PATIENCE)


def main() -> None:
    """Make so many runs, after one that tells how long they take."""
    rng = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    whole = 0.0
    for run in range(int(sys.argv[1]) + 1):
        method, rank = rng.choice(["downpour", "synchronous", "elastic"]), rng.randint(1, 4)
        after = rng.uniform(0, whole)
        with tempfile.TemporaryDirectory() as name:
            dying = (rank, after) if run else (-1, 0.0)
            ranks = begin(Path(name), method, 40, height=2, dying=dying)
            ends = [end_of(process) for process in ranks]
        codes = [end.returncode for end in ends]
        if not run:
            whole = max(float(end.stdout.split()[0]) for end in ends[1:])
            print(f"unharmed: {whole:.1f} s, exit statuses {codes}", flush=True)
            continue
        print(
            f"run {run}: {method}, rank {rank} killed after {after:.2f} s of {whole:.2f}; exit "
            f"statuses {codes}, {(ends[0].stdout.strip() or ends[0].stderr.strip())[-200:]}",
            flush=True,
        )
        # The other worker and the server come to their end, unless a rank has never come at all.
        others = codes[3:] if rank < 3 else codes[1:3]
        early = "served" not in ends[0].stdout
        assert early or (codes[0] == 0 and others == [0, 0]), [end.stderr for end in ends]


if __name__ == "__main__":
    main()
