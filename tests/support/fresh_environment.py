"""Fresh environments of Python, as a new user makes them; pip gets the packages."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]


def without_foreign() -> dict[str, str]:
    """Return this environment without variables of launchers, and none that add packages."""
    foreign = ("PYTHON", "VIRTUAL_ENV", "PMI", "OMPI", "MPI", "SLURM", "DISTCONV", "TORCHELASTIC")
    return {k: v for k, v in os.environ.items() if not k.startswith(foreign)} | {
        "OMP_NUM_THREADS": "1",
        "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
    }


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command to its end and return what it prints on stdout.

    Raises
    ------
    SystemExit
        Where the command fails.
    """
    print("+", *command, flush=True)
    done = subprocess.run(
        command, cwd=cwd, env=without_foreign(), timeout=600, stdout=subprocess.PIPE, text=True
    )
    print(done.stdout, end="", flush=True)
    if done.returncode:
        sys.exit(f"that has ended with status {done.returncode}")
    return done.stdout


def make(folder: Path) -> Path:
    """Make an environment without packages in `folder`, and return its interpreter."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def install(python: Path, *what: str | Path) -> None:
    """Install packages by pip, with the versions of constraints.txt."""
    constraints = ROOT / "constraints.txt"
    run(python, "-m", "pip", "install", "-q", "-c", constraints, *what, cwd=python.parent)
