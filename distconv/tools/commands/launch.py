"""`python -m distconv launch`: writes the batch script of a job, and submits it.

The scripts are templates, one for each scheduler. A job is the parsed command line, whose help
explains each option. A machine's file adds `variables` of the environment, and `options` of the
command that starts the ranks.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path, PurePath

from distconv.data.durable import write_atomically
from distconv.planning.machine import ALLOCATOR
from distconv.tools import command_line as shared
from distconv.tools.command_line import BadArguments, Command, complaining
from distconv.tools.templates import render
from distconv.transport.launch import CONTINUE

SCHEDULERS = {"slurm": ("sbatch",), "lsf": ("bsub",), "flux": ("flux", "batch"), "pbs": ("qsub",)}
"""The schedulers, each with the command that reads a script."""

_JOB = {
    "slurm": re.compile(r"job (\d+)"),
    "lsf": re.compile(r"Job <(\d+)>"),
    **{name: re.compile(r"^(\S+)\s*$", re.MULTILINE) for name in ("flux", "pbs")},
}
"""Patterns of a submitted job's number in the output of each scheduler."""

_AFTER = {
    "slurm": ["--dependency=afterany:{}"],
    "lsf": ["-w", "ended({})"],
    "flux": ["--dependency=afterany:{}"],
    "pbs": ["-W", "depend=afterany:{}"],
}
"""Options of the commands in `SCHEDULERS` for a job that starts when another has ended."""

TRANSPORTS = ("mpi", "torch", "nccl")

LAUNCHERS = "mpiexec mpirun srun jsrun lrun flux torchrun sbatch bsub qsub".split()
"""Programs that start ranks or jobs. The command of a job may not be one, as the script starts the
ranks."""

MARK = "# Written by: python -m distconv launch"
"""The beginning of the script's line that has the options of this command."""

_SCRIPT_OPTIONS = (
    "machine scheduler nodes ranks_per_node time cores_per_rank gpus_per_node transport name "
    "account queue mpi warn requeue chain setup directive"
).split()
"""Options that determine the script."""


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "command_line",
        nargs="*",
        metavar="-- COMMAND",
        help="the program that each rank runs, after --",
    )
    text = "a machine by its file, or by name, such as frontier: its scheduler and options"
    add("--machine", type=Path, metavar="FILE", help=text)
    add("--scheduler", choices=SCHEDULERS, help="the scheduler of the job (default: the machine's)")
    add("--nodes", type=int, required=True, help="the number of nodes, for this job alone")
    text = "ranks on a node, one for each GPU or socket (default: the machine's)"
    add("--ranks-per-node", type=int, help=text)
    text = "the longest time of the job: minutes, or HH:MM:SS"
    add("--time", type=_minutes, required=True, metavar="TIME", help=text)
    text = "cores of each rank (default: the machine's, or the node's cores in equal parts)"
    add("--cores-per-rank", type=int, help=text)
    add("--gpus-per-node", type=int, help="GPUs of each node (default: the machine's, or 0)")
    text = (
        "the transport of messages (default: torch, which uses NCCL, with a GPU for each rank, "
        "else mpi)"
    )
    add("--transport", choices=TRANSPORTS, help=text)
    add("--name", help="the name of the job (default: the program's name)")
    add("--account", help="the account, project or bank that is charged")
    add("--queue", help="the partition or queue of the job")
    add("--mpi", help="the option --mpi of srun: pmi2 for MPICH, pmix for Open MPI (Slurm only)")
    text = "minutes before the end at which ranks receive the signal USR1 (Slurm and LSF)"
    add("--warn", type=int, metavar="MINUTES", help=text)
    text = "requeue the job when its program has stopped by dc.training.TimeToStop (Slurm and LSF)"
    add("--requeue", action="store_true", help=text)
    text = "the number of jobs to submit; each starts when the one before it has ended"
    add("--chain", type=int, metavar="JOBS", help=text)
    text = "a shell command to run first, such as 'source .venv/bin/activate'; may be repeated"
    add("--setup", action="append", default=[], metavar="LINE", help=text)
    text = "a further option of the scheduler, such as --directive=--qos=debug; may be repeated"
    add("--directive", action="append", default=[], metavar="OPTION", help=text)
    add("--output", type=Path, metavar="FILE", help="the script to write (default: NAME.SCHEDULER)")
    add("--submit", action="store_true", help="submit the script to the scheduler as well")
    add("--dry-run", action="store_true", help="print the script without writing or submitting it")


def _minutes(text: str) -> int:
    """Parse minutes, or HH:MM:SS, into minutes, rounded up."""
    clock = re.fullmatch(r"(\d+):([0-5]\d):([0-5]\d)", text)
    if clock is None and not text.lstrip("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; write minutes, or HH:MM:SS")
    if clock is None:
        return int(text)
    hours, minutes, seconds = map(int, clock.groups())
    return 60 * hours + minutes + (seconds > 0)


def _run(job: Namespace) -> int:
    """Write, print or submit the script, and return the exit status."""
    shared.check_alone("launch")
    if job.submit and job.dry_run:
        raise BadArguments("--dry-run submits nothing; leave one of --submit and --dry-run out")
    origin = f"{MARK} {_as_given(job)}"
    _complete(job)
    if job.mpi is not None and job.scheduler != "slurm":
        raise BadArguments(f"--mpi {job.mpi} is an option of Slurm's srun; leave it out")
    with complaining(ValueError):
        check_job(job)
    if 0 < job.gpus_per_node < job.ranks_per_node:
        print(
            f"{job.ranks_per_node} ranks on a node share {job.gpus_per_node} GPUs, and send their "
            f"messages by MPI; {job.gpus_per_node} ranks, one for each GPU, send by NCCL",
            file=sys.stderr,
        )
    script = _script_of(job, origin)
    if job.dry_run:
        print(script, end="")
        return 0
    path = job.output or Path(f"{_title_of(job)}.{job.scheduler}")
    _write(path, script)
    ranks = _counted(job.nodes * job.ranks_per_node, "rank")
    print(f"{path}: {ranks} on {_counted(job.nodes, 'node')}", flush=True)
    return _submit(job, script) if job.submit else 0


def _as_given(job: Namespace) -> str:
    """Return the options of the command line as text; `launch` writes the same script from them."""
    words: list[str] = []
    for option in _SCRIPT_OPTIONS:
        given = getattr(job, option)
        for value in given if isinstance(given, list) else [given]:
            if value is True:
                words.append(f"--{option.replace('_', '-')}")
            elif value not in (None, 0):
                words.append(f"--{option.replace('_', '-')}={value}")
    return shlex.join([*words, "--", *job.command_line])


def _complete(job: Namespace) -> None:
    """Fill in the options that the command line lacks from the machine's file, if one is named.

    The machine's numbers of cores for each rank and of GPUs for each node are used only if the job
    has the machine's number of ranks on a node. The machine's scheduler options and setup come
    before those of the command line.
    """
    job.variables, job.options = {}, ()
    if job.machine is not None:
        _complete_from_machine(job)
    job.gpus_per_node = job.gpus_per_node or 0
    for option in ("scheduler", "ranks_per_node"):
        if getattr(job, option) is None:
            name = f"--{option.replace('_', '-')}"
            raise BadArguments(f"{name} is missing; pass it, or a machine by --machine FILE")


def _complete_from_machine(job: Namespace) -> None:
    machine = shared.loaded(job.machine)
    launch = machine.launch
    if launch is None:
        raise BadArguments(
            f"{str(job.machine)!r} does not describe how jobs start; add the entry `launch` to "
            "the file, or pass --scheduler instead of --machine"
        )
    if launch.scheduler not in SCHEDULERS:
        names = " or ".join(SCHEDULERS)
        raise BadArguments(f"{machine.name} has the scheduler {launch.scheduler!r}, not {names}")
    if job.ranks_per_node in (None, machine.ranks_per_node):
        job.ranks_per_node = machine.ranks_per_node
        if job.cores_per_rank is None:
            job.cores_per_rank = machine.threads
        if job.gpus_per_node is None:
            job.gpus_per_node = launch.gpus_per_node
    if job.scheduler in (None, launch.scheduler):
        job.directive = [*launch.directives, *job.directive]
        job.options = launch.options
    job.scheduler = job.scheduler or launch.scheduler
    job.setup, job.variables = [*launch.setup, *job.setup], machine.environment


def check_job(job: Namespace) -> None:
    """Raise `ValueError` for an inconsistent job, with a remedy."""
    for what in ("nodes", "ranks_per_node", "time", "cores_per_rank"):
        number = getattr(job, what)
        if number is not None and number < 1:
            unit = "minutes" if what == "time" else what.replace("_", " ")
            raise ValueError(f"{number} {unit} is not a valid number; choose 1 or more")
    _check_continuing(job)
    _check_gpus(job.ranks_per_node, job.gpus_per_node, job.transport)
    program = PurePath(job.command_line[0]).name if job.command_line else ""
    if not program or program in LAUNCHERS:
        raise ValueError(
            f"{program or 'nothing'} is not the program of a rank, and the script itself starts "
            "the ranks; write the command of each rank after --, as in -- python train.py"
        )
    if job.scheduler == "lsf" and job.cores_per_rank is None:
        raise ValueError(
            "LSF runs the script on a node outside the job, so the script cannot count the cores "
            "of the job's nodes; pass --cores-per-rank, for example 10 for 4 ranks on Lassen's 40 "
            "cores"
        )
    _check_texts(job)


def _check_continuing(job: Namespace) -> None:
    """Raise `ValueError` for a warning, requeueing or chain that the scheduler does not support."""
    if job.warn is not None and job.scheduler not in ("slurm", "lsf"):
        raise ValueError(
            f"--warn {job.warn}: {job.scheduler} sends no signal before the end of a job; give the "
            "limit in the program, as dc.training.TimeToStop(grid, limit=6600)"
        )
    if job.warn is not None and not 0 < job.warn < job.time:
        raise ValueError(
            f"--warn {job.warn} minutes before the end of a job of {job.time}; choose from 1 to "
            f"{job.time - 1}"
        )
    if job.requeue and job.scheduler not in ("slurm", "lsf"):
        # PBS's qrerun is for operators, and Flux has no command for it.
        raise ValueError(
            f"--requeue: a job of {job.scheduler} cannot queue itself again; submit a chain of "
            "jobs, as by --chain 4"
        )
    if job.chain is not None and (job.chain < 1 or job.requeue):
        raise ValueError(
            f"--chain {job.chain}{' and --requeue' if job.requeue else ''}: choose 1 or more jobs, "
            "or --requeue without --chain"
        )


def _check_gpus(ranks: int, gpus: int, transport: str | None) -> None:
    """Raise `ValueError` if a node's ranks cannot share its GPUs, or the transport needs more."""
    if gpus < 0:
        raise ValueError(f"{gpus} GPUs per node is not a number of GPUs; choose 0 or more")
    if gpus > ranks:
        raise ValueError(
            f"{ranks} ranks a node use {ranks} of its {gpus} GPUs, because each uses one; start "
            f"{gpus} ranks a node, or ask for {ranks} GPUs"
        )
    if gpus and ranks % gpus:
        raise ValueError(
            f"{ranks} ranks a node cannot share {gpus} GPUs evenly; the GPU with more ranks would "
            f"slow down the others. Start a multiple of {gpus} ranks a node"
        )
    if (transport == "nccl" and gpus != ranks) or (transport == "torch" and 0 < gpus < ranks):
        raise ValueError(
            f"between GPUs, {transport} uses NCCL, which needs a GPU for each rank: {ranks} ranks "
            f"a node have {gpus} GPUs; choose the transport mpi, or {ranks} GPUs"
        )


def _check_texts(job: Namespace) -> None:
    """Raise `ValueError` for a text that would not be one word, or one line, in the script."""
    for name in ("name", "account", "queue", "mpi"):
        text = getattr(job, name)
        if text is not None and not re.fullmatch(r"[\w.@:%+=-]+", text):
            raise ValueError(f"{name} {text!r} is not one word; use letters, digits, - and _")
    for variable in job.variables:
        if not re.fullmatch(r"[A-Za-z_]\w*", variable, re.ASCII):
            raise ValueError(
                f"environment: {variable!r} is not a valid name of a variable; use letters, "
                "digits and _"
            )
    of_machine = (*job.options, *job.variables.values(), str(job.machine or ""))
    for text in (*job.setup, *job.directive, *job.command_line, *of_machine):
        if re.search(r"[\0\r\n]", text):
            raise ValueError(f"{text!r} has more than one line; pass each line separately")


def _script_of(job: Namespace, origin: str) -> str:
    """Return the batch script of a job; `origin` is the line that holds its options."""
    own_gpus = job.gpus_per_node == job.ranks_per_node
    transport = job.transport or ("torch" if own_gpus else "mpi")
    allocator = {} if job.gpus_per_node else ALLOCATOR
    variables = {"DISTCONV_TRANSPORT": transport} | allocator | job.variables
    return render(
        f"{job.scheduler}.sh.j2",
        job=job,
        origin=origin,
        title=_title_of(job),
        ranks=job.nodes * job.ranks_per_node,
        program_continues=CONTINUE,
        clock=f"{job.time // 60:02d}:{job.time % 60:02d}",
        transport=transport,
        variables={name: _word(value) for name, value in variables.items()},
        program=shlex.join(job.command_line),
    )


def _title_of(job: Namespace) -> str:
    """Return the name of the job, by default the name of its program or module."""
    if job.name is not None:
        return str(job.name)
    words = list(job.command_line)
    if PurePath(words[0]).name.startswith("python") and len(words) > 1:
        words = [w for w in words[1:] if not w.startswith("-")] or words
    stem = PurePath(words[0]).name.removesuffix(".py")
    return re.sub(r"[^\w.-]", "-", stem) or "distconv"


def _word(value: str) -> str:
    """Quote a value as one word of a shell that expands only `$NAME` and `${NAME:-/tmp}` in it."""
    if re.fullmatch(r"[\w./:,=+@-]+", value):
        return value
    replaced = r"\$[A-Za-z_]\w*|\$\{[A-Za-z_]\w*(?::-[\w./-]*)?\}"
    # A backslash removes the meaning of any other special character in quotes.
    quoted = re.sub(rf'({replaced})|([$`"\\])', lambda found: found[1] or f"\\{found[2]}", value)
    return f'"{quoted}"'


def _write(path: Path, script: str) -> None:
    """Write a script to a new file, or over a file that `launch` has written."""
    if path.exists() and not (path.is_file() and MARK in path.read_text(errors="replace")):
        raise BadArguments(
            f"{str(path)!r} exists and was not written by this command; choose another --output"
        )
    try:
        write_atomically(path, lambda file: file.write(script.encode()))
    except OSError as error:
        raise BadArguments(f"cannot write {str(path)!r}: {error}; choose --output") from None


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _submit(job: Namespace, script: str) -> int:
    """Submit a script, or a chain of jobs; return the exit status of the scheduler's command."""
    submit = SCHEDULERS[job.scheduler]
    if shutil.which(submit[0]) is None:
        raise BadArguments(
            f"there is no {submit[0]} here; submit the script on a login node of the cluster, with "
            f"{' '.join(submit)} < FILE"
        )
    after: list[str] = []
    for number in range(job.chain or 1):
        ran = subprocess.run([*submit, *after], input=script, text=True, stdout=subprocess.PIPE)
        print(ran.stdout, end="", flush=True)
        if ran.returncode or not job.chain:
            return ran.returncode
        name = _JOB[job.scheduler].search(ran.stdout)
        if name is None:
            raise BadArguments(
                f"{submit[0]} printed no job number, so the next job cannot wait for the last; "
                f"{number + 1} of {job.chain} jobs are submitted"
            )
        after = [word.format(name[1]) for word in _AFTER[job.scheduler]]
    return 0


LAUNCH = Command("write the batch script of a job for a scheduler, and submit it", _options, _run)
