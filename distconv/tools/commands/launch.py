"""`python -m distconv launch`: writes the batch script of a job, and submits it."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from distconv.data.durable import write_atomically
from distconv.tools.arguments import BadArguments, complaining
from distconv.tools.batch import SCHEDULERS, TRANSPORTS, check_job, script_of, title_of
from distconv.tools.commands.options import Command, check_alone, loaded

MARK = "# Written by: python -m distconv launch"
"""Begins the line of a script that holds the options it was made with."""

_TOLD = (
    *("machine", "scheduler", "nodes", "ranks_per_node", "time", "cores_per_rank"),
    "gpus_per_node",
    *("transport", "name", "account", "queue", "mpi", "setup", "directive"),
)
"""Options that make the same script again."""


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "command_line",
        nargs="*",
        metavar="-- COMMAND",
        help="the program that each rank runs, after --",
    )
    text = "the file of a machine, such as machines/frontier.json: its scheduler and options"
    add("--machine", type=Path, metavar="FILE", help=text)
    add("--scheduler", choices=SCHEDULERS, help="the scheduler of the job (default: the machine's)")
    add("--nodes", type=int, required=True, help="the number of nodes, for this job alone")
    text = "ranks on a node, one for each GPU or socket (default: the machine's)"
    add("--ranks-per-node", type=int, help=text)
    text = "the longest time of the job: minutes, or HH:MM:SS"
    add("--time", type=_minutes, required=True, metavar="TIME", help=text)
    text = "cores of each rank (default: the machine's, or the node's cores in equal parts)"
    add("--cores-per-rank", type=int, help=text)
    add("--gpus-per-node", type=int, help="GPUs of each node (default: the machine's, or none)")
    text = "the carrier of messages (default: torch, by NCCL, with a GPU for each rank, else mpi)"
    add("--transport", choices=TRANSPORTS, help=text)
    add("--name", help="the name of the job (default: the program's name)")
    add("--account", help="the account, project or bank that is charged")
    add("--queue", help="the partition or queue of the job")
    add("--mpi", help="the --mpi of srun: pmi2 for MPICH, pmix for Open MPI (Slurm only)")
    text = "a line of shell to run first, such as 'source .venv/bin/activate'; may be repeated"
    add("--setup", action="append", default=[], metavar="LINE", help=text)
    text = "a further option of the scheduler, such as --directive=--qos=debug; may be repeated"
    add("--directive", action="append", default=[], metavar="OPTION", help=text)
    add("--output", type=Path, metavar="FILE", help="the script to write (default: NAME.SCHEDULER)")
    add("--submit", action="store_true", help="give the script to the scheduler as well")
    add("--dry-run", action="store_true", help="print the script; write and submit nothing")


def _run(job: argparse.Namespace) -> int:
    """Write, print or submit the script, and return the exit status."""
    check_alone("launch")
    if job.submit and job.dry_run:
        raise BadArguments("--dry-run submits nothing; leave one of --submit and --dry-run out")
    job.origin = f"{MARK} {_as_given(job)}"
    _complete(job)
    if job.mpi is not None and job.scheduler != "slurm":
        raise BadArguments(f"--mpi {job.mpi} is an option of Slurm's srun; leave it out")
    with complaining(ValueError):
        check_job(job)
        script = script_of(job)
    if job.dry_run:
        print(script, end="")
        return 0
    path = job.output or Path(f"{title_of(job)}.{job.scheduler}")
    _write(path, script)
    counts = ("rank", job.nodes * job.ranks_per_node), ("node", job.nodes)
    ranks, nodes = (f"{n} {what}{'s' * (n != 1)}" for what, n in counts)
    print(f"{path}: {ranks} on {nodes}", flush=True)
    if not job.submit:
        return 0
    submit = SCHEDULERS[job.scheduler].submit
    if shutil.which(submit[0]) is None:
        raise BadArguments(
            f"there is no {submit[0]} here; submit the script on a login node of the cluster, with "
            f"{' '.join(submit)} < FILE"
        )
    return subprocess.run(submit, input=script, text=True).returncode


def _minutes(text: str) -> int:
    """Parse minutes, or HH:MM:SS, into minutes, rounded up."""
    clock = re.fullmatch(r"(\d+):([0-5]\d):([0-5]\d)", text)
    if clock is None and not text.lstrip("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give minutes, or HH:MM:SS")
    if clock is None:
        return int(text)
    hours, minutes, seconds = map(int, clock.groups())
    return 60 * hours + minutes + (seconds > 0)


def _complete(job: argparse.Namespace) -> None:
    """Fill in the options that the command line lacks from the machine's file, if one is named.

    The machine's numbers of cores for each rank and of GPUs for each node are used only if the job
    has the machine's number of ranks on a node. The machine's scheduler options and setup come
    before those of the command line.
    """
    job.variables, job.options = {}, ()
    if job.machine is not None:
        machine = loaded(job.machine)
        launch = machine.launch
        if launch is None:
            raise BadArguments(
                f"{str(job.machine)!r} does not say how jobs start there; add its entry `launch`, "
                "or give --scheduler in place of --machine"
            )
        if launch.scheduler not in SCHEDULERS:
            names = " or ".join(SCHEDULERS)
            raise BadArguments(
                f"{machine.name} has the scheduler {launch.scheduler!r}, not {names}"
            )
        whole = job.ranks_per_node in (None, machine.ranks_per_node)
        if whole and job.cores_per_rank is None:
            job.cores_per_rank = machine.threads
        if whole and job.gpus_per_node is None:
            job.gpus_per_node = launch.gpus_per_node
        if job.ranks_per_node is None:
            job.ranks_per_node = machine.ranks_per_node
        if job.scheduler in (None, launch.scheduler):
            job.directive = [*launch.directives, *job.directive]
            job.options = launch.options
        job.scheduler = job.scheduler or launch.scheduler
        job.setup, job.variables = [*launch.setup, *job.setup], machine.environment
    job.gpus_per_node = job.gpus_per_node or 0
    for option in ("scheduler", "ranks_per_node"):
        if getattr(job, option) is None:
            name = f"--{option.replace('_', '-')}"
            raise BadArguments(f"{name} is missing; give it, or a machine by --machine FILE")


def _as_given(job: argparse.Namespace) -> str:
    """Return the command line's options as text, with which `launch` makes the same script."""
    words: list[str] = []
    for option in _TOLD:
        given = getattr(job, option)
        for value in given if isinstance(given, list) else [given]:
            if value not in (None, 0):
                words.append(f"--{option.replace('_', '-')}={value}")
    return shlex.join([*words, "--", *job.command_line])


def _write(path: Path, script: str) -> None:
    """Write a script to a new file, or over a file that `launch` has written."""
    if path.exists() and not (path.is_file() and MARK in path.read_text(errors="replace")):
        raise BadArguments(f"{str(path)!r} exists and is not a script of launch; choose --output")
    try:
        write_atomically(path, lambda file: file.write(script.encode()))
    except OSError as error:
        raise BadArguments(f"cannot write {str(path)!r}: {error}; choose --output") from None


LAUNCH = Command("write the batch script of a job for a scheduler, and submit it", _options, _run)
