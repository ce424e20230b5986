"""Starting ranks from a program that runs alone, as demos do."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

RANKS = 4
"""The number of ranks of a demo."""


def demo_output(module: str, description: str, output: Path) -> Path:
    """Return the output folder of a demo, on each of its ranks.

    A process that is started alone is replaced by these ranks, through a launcher.

    Args:
        module: the demo's module.
        description: the beginning of `--help`.
        output: the default of `--output`.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=output, help="folder (default %(default)s)")
    parser.add_argument(
        "--ranks",
        type=int,
        default=RANKS,
        help="how many to start; 0 on ranks that a launcher has started (default %(default)s)",
    )
    args = parser.parse_args()
    if args.ranks:
        become_ranks(args.ranks, module, ["--ranks", "0", "--output", str(args.output)])
    chosen: Path = args.output
    return chosen


def become_ranks(ranks: int, module: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by a module on a number of ranks, with the cores divided among them.

    An end of this process, even by SIGKILL, ends the launcher, and with it the job.
    """
    command = [mpiexec(), "-n", str(ranks), sys.executable, "-m", module, *arguments]
    print(" ".join(command), flush=True)
    threads = max(1, (os.cpu_count() or ranks) // ranks)
    environment = {"OMP_NUM_THREADS": str(threads), "MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}
    os.execve(command[0], command, environment | os.environ)


def words(options: dict[str, str]) -> list[str]:
    """Return options by name as words of a command line."""
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def mpiexec() -> str:
    """Return the launcher beside the running Python, where wheels install it, or on the path."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        sys.exit("error: there is no mpiexec; pip install mpich, or load the cluster's MPI")
    return found
