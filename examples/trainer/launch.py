"""Demos and studies: starting ranks from a program that runs alone, and making samples once."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from distconv.data.checkpoint import checkpoints_in
from distconv.grid.ranks import world

from .arguments import command_line, natural
from .progress import ON_TERMINAL, on_terminal

RANKS = 4
"""The number of ranks of a demo."""


def demo(name: str, description: str, run: Callable[[Path], None]) -> None:
    """Run a demo on its ranks; a process that is started alone is replaced by `mpiexec`.

    Args:
        name: the example's folder.
        description: the beginning of `--help`.
        run: runs the demo on all ranks, given its folder.
    """
    parser, add = command_line(f"{name}.demo", description)
    add("--output", "folder", type=Path, default=f"runs/demo-{name}")
    add("--ranks", "to start; 0 on ranks that a launcher has started", type=natural, default=RANKS)
    args = parser.parse_args()
    if args.ranks:
        become_ranks(
            args.ranks, f"examples.{name}.demo", ["--ranks", "0", "--output", str(args.output)]
        )
    run(args.output)


def generated(
    output: Path, generate: Callable[..., None], files: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """Generate the files of samples that are missing in a folder, and return all paths as options.
    Collective.

    The names of the files have the values of the options: other samples are other files.

    Args:
        generate: the `main` of the generator.
        files: by the name of the training's option, the generator's options.
    """
    comm = world().for_program()
    paths = {
        name: str(output / f"{'-'.join((name, *options.values()))}.h5")
        for name, options in files.items()
    }
    for name, options in files.items():
        if not comm.bcast(Path(paths[name]).exists()):
            generate(words({**options, "output": paths[name]}), comm)
    return paths


def interrupted(output: Path) -> dict[str, str]:
    """Return the option that resumes an interrupted run in a folder. Collective.

    Without an interrupted run there is none. A run that has ended, as metrics.json shows, which it
    writes last, makes room for a new one: its checkpoints and metrics.json are removed.
    """
    comm = world().for_program()
    resume = False
    if comm.rank == 0:
        checkpoints, results = checkpoints_in(output), output / "metrics.json"
        resume = bool(checkpoints) and not results.exists()
        for path in [] if resume else [*checkpoints, results]:
            path.unlink(missing_ok=True)
    return {"resume": str(output)} if comm.bcast(resume) else {}


def become_ranks(ranks: int, module: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by a module on a number of ranks, with the cores divided among them.

    An end of this process, even by SIGKILL, ends the launcher, and with it the job.
    """
    command = [mpiexec(), "-n", str(ranks), sys.executable, "-m", module, *arguments]
    print(" ".join(command), flush=True)
    threads = max(1, (os.cpu_count() or ranks) // ranks)
    environment = {"OMP_NUM_THREADS": str(threads), "MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}
    if on_terminal():
        environment[ON_TERMINAL] = "1"
    os.execve(command[0], command, environment | os.environ)


def words(options: Mapping[str, str]) -> list[str]:
    """Return options by name as words of a command line."""
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def found_mpiexec() -> str | None:
    """Return the launcher beside the running Python, where wheels install it, or on the path."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def mpiexec() -> str:
    """Return `found_mpiexec()`; end the program with an error if there is none."""
    found = found_mpiexec()
    if found is None:
        sys.exit("error: there is no mpiexec; pip install mpich, or load the cluster's MPI")
    return found
