"""Batch scripts that start a program on the nodes of a cluster, by Slurm, LSF, Flux or PBS.

A job is the parsed command line of `launch`, whose help explains each option. A machine's file adds
`variables` of the environment, and `options` of the command that starts the ranks.
"""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from string import Formatter
from typing import Any, NamedTuple

from distconv.planning.machine import ALLOCATOR

LAUNCHERS = (
    *("mpiexec", "mpirun", "srun", "jsrun", "lrun", "flux", "torchrun"),
    *("sbatch", "bsub", "qsub"),
)
"""Programs that start ranks, or jobs, which the script does itself."""

TRANSPORTS = ("mpi", "torch", "nccl")


class Scheduler(NamedTuple):
    """The parts from which the batch script for one scheduler is made.

    A line may name values in braces, such as `{nodes}`, which are filled in for each job; a line is
    left out if the job lacks one of its values. The values are the options of `launch`, and
    `title`, `clock`, `ranks` of the whole job, and `gpus` of a node. The names `on_gpus`,
    `own_gpus`, `shared_gpus`, `staged` and `unbound` are conditions: a line with one of them is
    left out unless the condition holds.

    Attributes
    ----------
    submit: the command that reads a script.
    prefix: the beginning of a line that the scheduler reads.
    directives: the options in the lines that begin with `prefix`.
    launch: the command that starts the ranks, with its options; `$cores` is the cores of a rank.
    note: a comment that explains the options.
    setup: lines of shell before the job's own setup.
    """

    submit: tuple[str, ...]
    prefix: str
    directives: tuple[str, ...]
    launch: tuple[str, ...]
    note: tuple[str, ...]
    setup: tuple[str, ...] = ()


_NODE_BY_NODE = (
    "Ranks are numbered node by node, so that those of a sample are neighbours.",
    "{on_gpus}Every rank sees the GPUs of its node and takes its own.",
)

SCHEDULERS = {
    "slurm": Scheduler(
        submit=("sbatch",),
        prefix="#SBATCH",
        directives=(
            "--job-name={title}",
            "--nodes={nodes}",
            "--ntasks-per-node={ranks_per_node}",
            "--time={clock}:00",
            "--exclusive",
            "--output=%x-%j.out",
            "--cpus-per-task={cores_per_rank}",
            "--gpus-per-node={gpus_per_node}",
            "--account={account}",
            "--partition={queue}",
        ),
        launch=(
            "trap 'exit 1' ERR\n"
            "srun --nodes={nodes} --ntasks={ranks} --ntasks-per-node={ranks_per_node}",
            "--cpus-per-task=$cores --threads-per-core=1 --cpu-bind=cores",
            "--distribution=block:block --kill-on-bad-exit=1",
            "--gpus-per-node={gpus_per_node} --gpu-bind=none",
            "--mpi={mpi}",
        ),
        note=(
            *_NODE_BY_NODE,
            "srun takes no number of cores over from sbatch, and ends with 137 where a rank has",
            "raised and others were killed: the trap makes that 1.",
        ),
    ),
    "lsf": Scheduler(
        submit=("bsub",),
        prefix="#BSUB",
        directives=(
            "-J {title}",
            "-nnodes {nodes}",
            "-W {clock}",
            "-o {title}-%J.out",
            "-P {account}",
            "-q {queue}",
        ),
        launch=(
            "jsrun --nrs {nodes} --rs_per_host 1 --tasks_per_rs {ranks_per_node}",
            "--cpu_per_rs $(( cores * {ranks_per_node} )) --gpu_per_rs {gpus}",
            "--launch_distribution packed --bind packed:$cores -X 1",
            '{staged}--smpiargs="-gpu"',
        ),
        note=("One resource set a node.", *_NODE_BY_NODE),
    ),
    "flux": Scheduler(
        submit=("flux", "batch"),
        prefix="# flux:",
        directives=(
            "--job-name={title}",
            "--nodes={nodes}",
            "--exclusive",
            "--time-limit={time}m",
            "--output={title}-{{{{id}}}}.out",
            "--setattr=system.bank={account}",
            "--queue={queue}",
        ),
        launch=(
            "flux run --nodes={nodes} --ntasks={ranks} --cores-per-task=$cores",
            "-o cpu-affinity=per-task -o exit-on-error",
            "{own_gpus}--gpus-per-task=1 -o gpu-affinity=on",
            "{shared_gpus}--exclusive -o gpu-affinity=on",
        ),
        note=_NODE_BY_NODE,
    ),
    "pbs": Scheduler(
        submit=("qsub",),
        prefix="#PBS",
        directives=(
            "-N {title}",
            "-l select={nodes}",
            "-l place=scatter",
            "-l walltime={clock}:00",
            "-j oe",
            "-A {account}",
            "-q {queue}",
        ),
        launch=(
            "mpiexec -n {ranks} -ppn {ranks_per_node}",
            "{unbound}--depth=$cores --cpu-bind depth",
        ),
        note=_NODE_BY_NODE,
        setup=('cd "$PBS_O_WORKDIR"',),
    ),
}

_COUNTED = """\
# The cores of a node in equal parts, hardware threads not counted.
cores=$(( $(lscpu --parse=CORE,SOCKET | grep -v '^#' | sort -u | wc -l) / {ranks} ))
[ "$cores" -ge 1 ] || {{ echo "a node has fewer cores than its {ranks} ranks" >&2; exit 1; }}"""


def check_job(job: Namespace) -> None:
    """Raise `ValueError` for an inconsistent job, with a remedy."""
    ranks, gpus, carrier = job.ranks_per_node, job.gpus_per_node, job.transport
    program = PurePath(job.command_line[0]).name if job.command_line else ""
    for what in ("nodes", "ranks_per_node", "time", "cores_per_rank"):
        number = getattr(job, what)
        if number is not None and number < 1:
            what = {"time": "minutes"}.get(what, what.replace("_", " "))
            raise ValueError(f"{number} {what} run nothing; give a number from 1")
    if gpus < 0:
        raise ValueError(f"{gpus} GPUs per node is no number of GPUs; give one from 0")
    if gpus > ranks:
        raise ValueError(
            f"{ranks} ranks a node use {ranks} of its {gpus} GPUs, as each takes one; start {gpus} "
            f"ranks a node, or ask for {ranks} GPUs"
        )
    if gpus and ranks % gpus:
        raise ValueError(
            f"{ranks} ranks a node cannot share {gpus} GPUs evenly; the GPU with more ranks would "
            f"hold up the others. Start a multiple of {gpus} ranks a node"
        )
    if (carrier == "nccl" and gpus != ranks) or (carrier == "torch" and 0 < gpus < ranks):
        raise ValueError(
            f"between GPUs, {carrier} sends by NCCL, and NCCL needs a GPU for each rank: {ranks} "
            f"ranks a node have {gpus}; choose the transport mpi, or as many GPUs as ranks"
        )
    if not program or program in LAUNCHERS:
        raise ValueError(
            f"{program or 'nothing'} is no program of a rank, and the script starts the ranks; "
            "write what each runs behind --, as in -- python train.py"
        )
    if job.scheduler == "lsf" and job.cores_per_rank is None:
        raise ValueError(
            "LSF runs the script on a node that is not one of the job's, and cannot count the "
            "cores there; give --cores-per-rank, which is 10 for 4 ranks on Lassen's 40 cores"
        )
    for name in ("name", "account", "queue", "mpi"):
        text = getattr(job, name)
        if text is not None and not re.fullmatch(r"[\w.@:%+=-]+", text):
            raise ValueError(f"{name} {text!r} is not one word; use letters, digits, - and _")
    for variable in job.variables:
        if not re.fullmatch(r"[A-Za-z_]\w*", variable, re.ASCII):
            raise ValueError(
                f"environment: {variable!r} is no name of a variable; use letters, digits and _"
            )
    of_machine = (*job.options, *job.variables.values(), str(job.machine or ""))
    for text in (*job.setup, *job.directive, *job.command_line, *of_machine):
        if re.search(r"[\0\r\n]", text):
            raise ValueError(f"{text!r} has more than one line; give each line by itself")


def title_of(job: Namespace) -> str:
    """Return the name of the job: the given one, or that of its program or module."""
    if job.name is not None:
        return str(job.name)
    words = list(job.command_line)
    if PurePath(words[0]).name.startswith("python") and len(words) > 1:
        words = [w for w in words[1:] if not w.startswith("-")] or words
    stem = PurePath(words[0]).name.removesuffix(".py")
    return re.sub(r"[^\w.-]", "-", stem) or "distconv"


def script_of(job: Namespace) -> str:
    """Return the batch script of a job: directives, setup, and the command that starts ranks."""
    scheduler, cores = SCHEDULERS[job.scheduler], f"cores={job.cores_per_rank}"
    if job.cores_per_rank is None:
        cores = _COUNTED.format(ranks=job.ranks_per_node)
    own = job.gpus_per_node == job.ranks_per_node
    carrier = job.transport or ("torch" if own else "mpi")
    facts = {
        "on_gpus": job.gpus_per_node > 0,
        "own_gpus": own,
        "shared_gpus": 0 < job.gpus_per_node < job.ranks_per_node,
        "staged": job.gpus_per_node > 0 and carrier == "mpi",
        "unbound": not any("--cpu-bind" in option for option in job.options),
    }
    values = vars(job) | {name: "" if so else None for name, so in facts.items()}
    values |= {"title": title_of(job), "ranks": job.nodes * job.ranks_per_node}
    values |= {"clock": f"{job.time // 60:02d}:{job.time % 60:02d}", "gpus": str(job.gpus_per_node)}
    variables = {"DISTCONV_TRANSPORT": carrier, **({} if job.gpus_per_node else ALLOCATOR)}
    directives = (*_filled(scheduler.directives, values), *job.directive)
    launch = (*_filled(scheduler.launch, values), *job.options, shlex.join(job.command_line))
    lines = [
        "#!/bin/bash",
        *(f"{scheduler.prefix} {directive}" for directive in directives),
        *("", job.origin, "set -e", *scheduler.setup, *job.setup),
        *("", cores, "export OMP_NUM_THREADS=$cores"),
        *(f"export {name}={_word(value)}" for name, value in (variables | job.variables).items()),
        *("", *(f"# {line}" for line in _filled(scheduler.note, values))),
        " \\\n    ".join(launch),
    ]
    return "\n".join(lines) + "\n"


def _filled(lines: Iterable[str], values: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines with their values filled in; leave out lines that name a value of None or 0."""
    for line in lines:
        names = [name for _, name, _, _ in Formatter().parse(line) if name]
        if all(values[name] not in (None, 0) for name in names):
            yield line.format(**values)


def _word(value: str) -> str:
    """Quote a value as one word of the shell, which replaces `$NAME` and `${NAME:-/tmp}` only."""
    if re.fullmatch(r"[\w./:,=+@-]+", value):
        return value
    replaced = r"\$[A-Za-z_]\w*|\$\{[A-Za-z_]\w*(?::-[\w./-]*)?\}"
    # Any other character with a meaning in quotes stands for itself behind a backslash.
    quoted = re.sub(rf'({replaced})|([$`"\\])', lambda found: found[1] or f"\\{found[2]}", value)
    return f'"{quoted}"'
