"""Check that distconv works where there is no MPI: `make no-mpi`, in about two minutes.

A fresh environment in a temporary folder gets distconv with what it requires, first without mpi4py,
then with it, but without the library of any MPI. In both a network trains in one process, and under
torchrun on two, to the numbers of serial torch.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tests.support.fresh_environment import ROOT, install, make, run

SOURCES = "distconv", "layers", "setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"

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


def check(folder: Path) -> None:
    """Make the environment in an empty folder, and run all in it."""
    python = make(folder / "venv")
    script = folder / "training.py"
    script.write_text(TRAINING)
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        path = ROOT / name
        (shutil.copytree if path.is_dir() else shutil.copy)(path, source / name)

    install(python, source)
    shutil.rmtree(source)
    for stage in ("without mpi4py", "with mpi4py, and no library of MPI"):
        print(f"== {stage}", flush=True)
        if stage != "without mpi4py":
            install(python, "mpi4py")
        run(python, "-c", NO_MPI, cwd=folder)
        run(python, script, "1", cwd=folder)
        torchrun = python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"
        run(*torchrun, script, "2", cwd=folder)
    print("distconv works without MPI")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        check(Path(name))
