"""`python -m distconv launch`: writes the batch script of a job, and submits it."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
from pathlib import Path

from distconv.data.durable import write_atomically
from distconv.tools.arguments import BadArguments, complaining
from distconv.tools.batch import SCHEDULERS, TRANSPORTS, BatchJob, Scheduler
from distconv.tools.commands.options import Command, check_alone

MARK = "# Written by: python -m distconv launch"
"""Begins the line by which a script tells how it was made."""


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("command_line", nargs="*", metavar="-- COMMAND", help="the program of a rank, behind --")
    add("--scheduler", choices=SCHEDULERS, required=True, help="what runs the job")
    add("--nodes", type=int, required=True, help="how many the job gets, all to itself")
    add("--ranks-per-node", type=int, required=True, help="one for each GPU, or socket")
    add("--time", type=int, required=True, metavar="MINUTES", help="when the job is ended")
    add(
        "--cores-per-rank",
        type=int,
        help="what a rank is bound to and computes with (default: the node's cores in equal parts)",
    )
    add("--gpus-per-node", type=int, default=0, help="of each node (default: none)")
    add(
        "--transport",
        choices=TRANSPORTS,
        help="how messages travel (default: torch, by NCCL, with a GPU for each rank, else mpi)",
    )
    add("--name", help="of the job (default: that of the program)")
    add("--account", help="who is charged: account, project or bank")
    add("--queue", help="where the job waits: partition or queue")
    add("--mpi", help="how srun and MPI meet: pmi2 for MPICH, pmix for Open MPI (Slurm only)")
    add(
        "--setup",
        action="append",
        default=[],
        metavar="LINE",
        help="of shell, run first, such as 'source .venv/bin/activate'; once for each line",
    )
    add(
        "--directive",
        action="append",
        default=[],
        metavar="OPTION",
        help="a further option of the scheduler, such as --directive=--qos=debug; once for each",
    )
    add("--output", type=Path, metavar="FILE", help="of the script (default: NAME.SCHEDULER)")
    add("--submit", action="store_true", help="give the script to the scheduler as well")
    add("--dry-run", action="store_true", help="print the script; write and submit nothing")


def _run(arguments: argparse.Namespace) -> int:
    """Write, print or submit the script, and return the exit status."""
    check_alone("launch")
    if arguments.submit and arguments.dry_run:
        raise BadArguments("--dry-run submits nothing; leave one of --submit and --dry-run out")
    scheduler = SCHEDULERS[arguments.scheduler]
    with complaining(ValueError):
        job = _job(arguments)
        script = scheduler.script(job)
    if arguments.dry_run:
        print(script, end="")
        return 0
    path = arguments.output or Path(f"{job.title}.{arguments.scheduler}")
    _write(path, script)
    ranks, nodes = (
        f"{n} {what}{'s' * (n != 1)}" for n, what in ((job.ranks, "rank"), (job.nodes, "node"))
    )
    print(f"{path}: {ranks} on {nodes}", flush=True)
    return _submitted(scheduler, script) if arguments.submit else 0


_TAKEN = (
    *("nodes", "ranks_per_node", "cores_per_rank", "gpus_per_node", "transport", "name"),
    *("account", "queue", "mpi"),
)
"""Options that a job has under the same names."""


def _job(arguments: argparse.Namespace) -> BatchJob:
    given = {option: getattr(arguments, option) for option in _TAKEN}
    return BatchJob(
        command=tuple(arguments.command_line),
        minutes=arguments.time,
        setup=tuple(arguments.setup),
        directives=tuple(arguments.directive),
        origin=f"{MARK} {_options_of(arguments)}",
        **given,
    )


def _options_of(arguments: argparse.Namespace) -> str:
    """Return the options that make this script again."""
    words: list[str] = []
    for option in ("scheduler", *_TAKEN[:2], "time", *_TAKEN[2:], "setup", "directive"):
        given = getattr(arguments, option)
        for value in given if isinstance(given, list) else [given]:
            if value not in (None, 0):
                words.append(f"--{option.replace('_', '-')}={value}")
    return shlex.join([*words, "--", *arguments.command_line])


def _write(path: Path, script: str) -> None:
    """Write a script to where there is none, or one that this command has written."""
    if path.exists() and not (path.is_file() and MARK in path.read_text(errors="replace")):
        raise BadArguments(f"{str(path)!r} exists and is not a script of launch; choose --output")
    try:
        write_atomically(path, lambda file: file.write(script.encode()))
    except OSError as error:
        raise BadArguments(f"cannot write {str(path)!r}: {error}; choose --output") from None


def _submitted(scheduler: Scheduler, script: str) -> int:
    """Give a script to the scheduler, and return the status with which that ends."""
    program = scheduler.submit[0]
    if shutil.which(program) is None:
        raise BadArguments(
            f"there is no {program} here; submit the script on a login node of the cluster, with "
            f"{' '.join(scheduler.submit)} < FILE"
        )
    return subprocess.run(scheduler.submit, input=script, text=True).returncode


LAUNCH = Command("write the batch script of a job for a scheduler, and submit it", _options, _run)
