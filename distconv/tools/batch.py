"""Batch scripts that start a program on the nodes of a cluster, by Slurm, LSF, Flux or PBS.

A job is the parsed command line of `launch`, whose help explains each option. A machine adds its
`variables`, and `options` of the command that starts the ranks.
"""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath
from typing import NamedTuple

from distconv.planning.machine import ALLOCATOR

LAUNCHERS = (
    *("mpiexec", "mpirun", "srun", "jsrun", "lrun", "flux", "torchrun"),
    *("sbatch", "bsub", "qsub"),
)
"""Programs that start ranks, or jobs, which the script does itself."""

TRANSPORTS = ("mpi", "torch", "nccl")


def check_job(job: Namespace) -> None:
    """Raise `ValueError` for an inconsistent job, with the way out."""
    ranks, gpus, carrier = job.ranks_per_node, job.gpus_per_node, job.transport
    program = PurePath(job.command_line[0]).name if job.command_line else ""
    wrong = [
        (
            number is not None and number < 1,
            f"{number} {what} run nothing; give a number from 1",
        )
        for what, number in (
            ("nodes", job.nodes),
            ("ranks per node", ranks),
            ("minutes", job.time),
            ("cores per rank", job.cores_per_rank),
        )
    ]
    wrong += [
        (gpus < 0, f"{gpus} GPUs per node is no number of GPUs; give one from 0"),
        (
            gpus > ranks,
            f"{ranks} ranks a node use {ranks} of its {gpus} GPUs, as each takes one; start {gpus} "
            f"ranks a node, or ask for {ranks} GPUs",
        ),
        (
            gpus > 0 and ranks % max(gpus, 1) > 0,
            f"{ranks} ranks a node cannot share {gpus} GPUs evenly; the GPU with more ranks would "
            f"hold up the others. Start a multiple of {gpus} ranks a node",
        ),
        (
            (carrier == "nccl" and gpus != ranks) or (carrier == "torch" and 0 < gpus < ranks),
            f"between GPUs, {carrier} sends by NCCL, and NCCL needs a GPU for each rank: {ranks} "
            f"ranks a node have {gpus}; choose the transport mpi, or as many GPUs as ranks",
        ),
        (not program, "there is no program to run; write it behind --, as in -- python train.py"),
        (
            program in LAUNCHERS,
            f"{program} starts ranks, as the script does; give the program of one rank, as in -- "
            "python train.py",
        ),
    ]
    words = {name: getattr(job, name) for name in ("name", "account", "queue", "mpi")}
    wrong += [
        (
            text is not None and not re.fullmatch(r"[\w.@:%+=-]+", text),
            f"{name} {text!r} is not one word; use letters, digits, - and _",
        )
        for name, text in words.items()
    ]
    wrong += [
        ("\n" in text or "\0" in text, f"{text!r} has more than one line; give each line by itself")
        for text in (*job.setup, *job.directive, *job.command_line)
    ]
    for found, message in wrong:
        if found:
            raise ValueError(message)


def title_of(job: Namespace) -> str:
    """Return the name of the job: as given, or that of the program's script or module."""
    if job.name is not None:
        return str(job.name)
    words = list(job.command_line)
    if PurePath(words[0]).name.startswith("python") and len(words) > 1:
        words = [w for w in words[1:] if not w.startswith("-")] or words
    stem = PurePath(words[0]).name.removesuffix(".py")
    return re.sub(r"[^\w.-]", "-", stem) or "distconv"


def _carrier(job: Namespace) -> str:
    own_gpu = job.gpus_per_node == job.ranks_per_node
    return job.transport or ("torch" if own_gpu else "mpi")


def _clock(job: Namespace) -> str:
    return f"{job.time // 60:02d}:{job.time % 60:02d}"


def _named(job: Namespace, **options: str) -> list[str]:
    """Return options for the values that the job has, with their values."""
    values = ((text, getattr(job, name)) for name, text in options.items())
    return [text.format(value) for text, value in values if value not in (None, 0)]


def _script(
    job: Namespace, prefix: str, directives: Iterable[str], launch: Sequence[str], note: str
) -> str:
    """Return a script: directives of the scheduler, the setup, and the start of the ranks.

    Parameters
    ----------
    prefix: begins a line that the scheduler reads, such as "#SBATCH".
    launch: the command that starts the ranks, with its options; `$cores` are those of a rank.
    note: a comment that explains the options.
    """
    ranks, cores = job.ranks_per_node, [f"cores={job.cores_per_rank}"]
    if job.cores_per_rank is None:
        of_node = "$(lscpu --parse=CORE,SOCKET | grep -v '^#' | sort -u | wc -l)"
        cores = [
            "# The cores of a node in equal parts, hardware threads not counted.",
            f"cores=$(( {of_node} / {ranks} ))",
            f'[ "$cores" -ge 1 ] || {{ echo "a node has fewer cores than its {ranks} ranks" >&2; '
            "exit 1; }",
        ]
    variables = {"DISTCONV_TRANSPORT": _carrier(job), **({} if job.gpus_per_node else ALLOCATOR)}
    variables |= job.variables
    lines = [
        "#!/bin/bash",
        *(f"{prefix} {directive}" for directive in (*directives, *job.directive)),
        *("", job.origin, "set -e", *job.setup),
        *("", *cores, "export OMP_NUM_THREADS=$cores"),
        *(f"export {name}={_word(value)}" for name, value in variables.items()),
        *("", *(f"# {line}" for line in note.splitlines())),
        " \\\n    ".join([*launch, *job.options, shlex.join(job.command_line)]),
    ]
    return "\n".join(lines) + "\n"


def _word(value: str) -> str:
    """Return a value as a word of the shell, which puts in the variables that it names."""
    return value if re.fullmatch(r"[\w./:,=+@-]+", value) else f'"{value}"'


def slurm_script(job: Namespace) -> str:
    """Return the script for `sbatch`; `srun` starts the ranks in it."""
    nodes, ranks = job.nodes, job.ranks_per_node
    directives = [
        f"--job-name={title_of(job)}",
        f"--nodes={nodes}",
        f"--ntasks-per-node={ranks}",
        f"--time={_clock(job)}:00",
        "--exclusive",
        "--output=%x-%j.out",
        *_named(job, cores_per_rank="--cpus-per-task={}", gpus_per_node="--gpus-per-node={}"),
        *_named(job, account="--account={}", queue="--partition={}"),
    ]
    launch = [
        "trap 'exit 1' ERR\n"
        f"srun --nodes={nodes} --ntasks={nodes * ranks} --ntasks-per-node={ranks}",
        "--cpus-per-task=$cores --threads-per-core=1 --cpu-bind=cores",
        "--distribution=block:block --kill-on-bad-exit=1",
        *_named(job, gpus_per_node="--gpus-per-node={} --gpu-bind=none", mpi="--mpi={}"),
    ]
    note = (
        "Ranks are numbered node by node, so that those of a sample are neighbours. srun takes no\n"
        "number of cores over from sbatch, and ends with 137 where a rank has raised and others\n"
        "were killed: the trap makes that 1."
    )
    if job.gpus_per_node:
        note += " Every rank sees the GPUs of its node and takes its own."
    return _script(job, "#SBATCH", directives, launch, note)


def lsf_script(job: Namespace) -> str:
    """Return the script for `bsub`; `jsrun` starts the ranks in it.

    Raises
    ------
    ValueError
        Where the cores of a rank are not given: LSF runs the script on another node.
    """
    if job.cores_per_rank is None:
        raise ValueError(
            "LSF runs the script on a node that is not one of the job's, and cannot count the "
            "cores there; give --cores-per-rank, which is 10 for 4 ranks on Lassen's 40 cores"
        )
    ranks, title = job.ranks_per_node, title_of(job)
    directives = [
        f"-J {title}",
        f"-nnodes {job.nodes}",
        f"-W {_clock(job)}",
        f"-o {title}-%J.out",
        *_named(job, account="-P {}", queue="-q {}"),
    ]
    launch = [
        f"jsrun --nrs {job.nodes} --rs_per_host 1 --tasks_per_rs {ranks}",
        f"--cpu_per_rs $(( cores * {ranks} )) --gpu_per_rs {job.gpus_per_node}",
        "--launch_distribution packed --bind packed:$cores -X 1",
    ]
    note = (
        "One resource set a node: ranks are numbered node by node, so that those of a sample are\n"
        "neighbours"
    )
    note += ", see the GPUs of their node, and take one each." if job.gpus_per_node else "."
    if job.gpus_per_node and _carrier(job) == "mpi":
        # Spectrum MPI accepts messages on a GPU only if told so.
        launch.append('--smpiargs="-gpu"')
    return _script(job, "#BSUB", directives, launch, note)


def flux_script(job: Namespace) -> str:
    """Return the script for `flux batch`; `flux run` starts the ranks in it."""
    title, own = title_of(job), job.gpus_per_node == job.ranks_per_node
    directives = [
        f"--job-name={title}",
        f"--nodes={job.nodes}",
        "--exclusive",
        f"--time-limit={job.time}m",
        f"--output={title}-{{{{id}}}}.out",
        *_named(job, account="--setattr=system.bank={}", queue="--queue={}"),
    ]
    launch = [
        f"flux run --nodes={job.nodes} --ntasks={job.nodes * job.ranks_per_node} "
        "--cores-per-task=$cores",
        "-o cpu-affinity=per-task -o exit-on-error",
    ]
    note = "Ranks are numbered node by node, so that those of a sample are neighbours."
    if job.gpus_per_node:
        # A whole number of GPUs for each task, or the whole node.
        launch.append(f"--{'gpus-per-task=1' if own else 'exclusive'} -o gpu-affinity=on")
        note += "\nEvery rank sees the GPUs of its node and takes its own."
    return _script(job, "# flux:", directives, launch, note)


def pbs_script(job: Namespace) -> str:
    """Return the script that `qsub` takes; the `mpiexec` of Cray's PALS starts the ranks in it."""
    nodes, ranks = job.nodes, job.ranks_per_node
    directives = [
        f"-N {title_of(job)}",
        f"-l select={nodes}",
        "-l place=scatter",
        f"-l walltime={_clock(job)}:00",
        "-j oe",
        *_named(job, account="-A {}", queue="-q {}"),
    ]
    launch = [f"mpiexec -n {nodes * ranks} -ppn {ranks}"]
    if not any("--cpu-bind" in option for option in job.options):
        launch.append("--depth=$cores --cpu-bind depth")
    note = "Ranks are numbered node by node, so that those of a sample are neighbours."
    if job.gpus_per_node:
        note += "\nEvery rank sees the GPUs of its node and takes its own."
    job.setup = ['cd "$PBS_O_WORKDIR"', *job.setup]
    return _script(job, "#PBS", directives, launch, note)


class Scheduler(NamedTuple):
    """A scheduler's function for scripts, and the command that reads one from standard input."""

    script: Callable[[Namespace], str]
    submit: tuple[str, ...]


SCHEDULERS = {
    "slurm": Scheduler(slurm_script, ("sbatch",)),
    "lsf": Scheduler(lsf_script, ("bsub",)),
    "flux": Scheduler(flux_script, ("flux", "batch")),
    "pbs": Scheduler(pbs_script, ("qsub",)),
}
