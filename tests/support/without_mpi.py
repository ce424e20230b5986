"""Check that distconv works where there is no MPI: `make no-mpi`, in about two minutes.

A fresh environment in a temporary folder gets torch, numpy and distconv, first without mpi4py, then
with it, but without the library of any MPI. In both a network trains in one process, and under
torchrun on two, to the numbers of serial torch. Packages come from where pip takes them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = "distconv", "layers", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"

TRAINING = """
import sys
import torch
from torch import nn
import distconv as dc

assert "mpi4py.MPI" not in sys.modules
RANKS = int(sys.argv[1])

def losses(grid):
    torch.manual_seed(0)
    x, y = torch.randn(2, 1, 16, 8, dtype=torch.double), torch.randn(2, 2, 8, 4, dtype=torch.double)
    net = nn.Sequential(
        nn.Conv2d(1, 3, 5, padding=2), nn.BatchNorm2d(3), nn.ReLU(),
        nn.Conv2d(3, 2, 3, stride=2, padding=1),
    ).double()
    if grid is not None:
        net = dc.parallelize(net, grid)
        x, y = dc.distribute_tensor(x, grid), dc.distribute_tensor(y, grid)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        loss = nn.functional.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()

grid = dc.ProcessGrid(height=-1)
assert grid.size == RANKS, grid
for ours, serial in zip(losses(grid), losses(None), strict=True):
    assert abs(ours - serial) < 1e-9, (ours, serial)
print(f"rank {grid.rank} of {grid.size}: as serial torch", flush=True)
"""

NO_MPI = """
try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    print(type(error).__name__, str(error).splitlines()[0])
else:
    raise SystemExit(f"this machine has an MPI: {MPI.Get_library_version()}")
"""


def environment() -> dict[str, str]:
    """Return this environment without what points to packages, or tells of launchers."""
    foreign = ("PYTHON", "VIRTUAL_ENV", "PMI", "OMPI", "MPI", "SLURM", "DISTCONV", "TORCHELASTIC")
    return {k: v for k, v in os.environ.items() if not k.startswith(foreign)} | {
        "OMP_NUM_THREADS": "1"
    }


def run(*command: str | Path, cwd: Path) -> None:
    """Run a command to its end; where it fails, so does this program."""
    print("+", *command, flush=True)
    status = subprocess.run(command, cwd=cwd, env=environment(), timeout=600).returncode
    if status:
        sys.exit(f"that has ended with status {status}")


def check(folder: Path) -> None:
    """Make the environment in an empty folder, and run all in it."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    install = python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt"
    script = folder / "training.py"
    script.write_text(TRAINING)
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        path = ROOT / name
        (shutil.copytree if path.is_dir() else shutil.copy)(path, source / name)

    run(*install, "torch", "numpy", cwd=folder)
    run(*install, "--no-deps", source, cwd=folder)
    shutil.rmtree(source)
    for stage in ("without mpi4py", "with mpi4py, and no library of MPI"):
        print(f"== {stage}", flush=True)
        if stage != "without mpi4py":
            run(*install, "mpi4py", cwd=folder)
        run(python, "-c", NO_MPI, cwd=folder)
        run(python, script, "1", cwd=folder)
        torchrun = python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"
        run(*torchrun, script, "2", cwd=folder)
    print("distconv works without MPI")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        check(Path(name))
