"""Batch scripts that start a program on the nodes of a cluster, by Slurm, LSF or Flux."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import NamedTuple

from distconv.planning.machine import ALLOCATOR

LAUNCHERS = ("mpiexec", "mpirun", "srun", "jsrun", "lrun", "flux", "torchrun", "sbatch", "bsub")
"""Programs that start ranks, or jobs; the script does that."""

TRANSPORTS = ("mpi", "torch", "nccl")

_WORD = re.compile(r"[\w.@:%+=-]+")


@dataclass(frozen=True)
class BatchJob:
    """A program on a number of nodes, with as many ranks on each, which have the nodes alone.

    Parameters
    ----------
    command: the program of every rank, with its arguments.
    nodes, ranks_per_node: how many ranks there are, and where.
    minutes: after which the scheduler ends the job.
    cores_per_rank: what each rank is bound to, and computes with; when not given, all cores of the
        node in equal parts, as the script finds them there. LSF needs the number.
    gpus_per_node: how many each node has; every rank sees all of its node, and distconv gives each
        its own.
    transport: how distconv sends its messages. By default "torch", which is NCCL, where each rank
        has a GPU of its own, and "mpi" elsewhere.
    name, account, queue: as the scheduler calls the job, whom it charges, and where it waits.
    mpi: what Slurm's `srun --mpi` is told, such as pmi2 or pmix.
    setup: lines of shell that the script runs first, such as "source .venv/bin/activate".
    directives: further options of the scheduler, each as its command line has it.
    origin: a comment of one line in the script that tells how it was made.

    Raises
    ------
    ValueError
        Where that makes no sense, with the way out.
    """

    command: tuple[str, ...]
    nodes: int
    ranks_per_node: int
    minutes: int
    cores_per_rank: int | None = None
    gpus_per_node: int = 0
    transport: str | None = None
    name: str | None = None
    account: str | None = None
    queue: str | None = None
    mpi: str | None = None
    setup: tuple[str, ...] = ()
    directives: tuple[str, ...] = ()
    origin: str = ""

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_gpus()
        self._check_command()
        for option in ("name", "account", "queue", "mpi"):
            text = getattr(self, option)
            if text is not None and not _WORD.fullmatch(text):
                raise ValueError(f"{option} {text!r} is not one word; use letters, digits, - and _")
        for text in (*self.setup, *self.directives, *self.command, self.origin):
            if "\n" in text or "\0" in text:
                raise ValueError(f"{text!r} has more than one line; give each line by itself")

    def _check_numbers(self) -> None:
        for what in ("nodes", "ranks_per_node", "minutes", "cores_per_rank"):
            number = getattr(self, what)
            if number is not None and number < 1:
                words = what.replace("_", " ")
                raise ValueError(f"{number} {words} run nothing; give a number from 1")

    def _check_gpus(self) -> None:
        ranks, gpus = self.ranks_per_node, self.gpus_per_node
        if gpus < 0:
            raise ValueError(f"{gpus} GPUs per node is no number of GPUs; give one from 0")
        if gpus > ranks:
            raise ValueError(
                f"{ranks} ranks a node use {ranks} of its {gpus} GPUs, as each takes one; start "
                f"{gpus} ranks a node, or ask for {ranks} GPUs"
            )
        if gpus and ranks % gpus:
            raise ValueError(
                f"{ranks} ranks a node cannot share {gpus} GPUs evenly; the GPU with more ranks "
                f"would hold up the others. Start {ranks // gpus * gpus} ranks a node"
            )
        if self.transport not in (None, *TRANSPORTS):
            raise ValueError(
                f"there is no transport {self.transport!r}; choose from {', '.join(TRANSPORTS)}"
            )
        if self.transport == "nccl" and gpus != ranks:
            raise ValueError(
                f"NCCL needs a GPU for each rank, and {ranks} ranks a node have {gpus}; choose the "
                "transport mpi, or as many GPUs as ranks"
            )
        if self.transport == "torch" and 0 < gpus < ranks:
            raise ValueError(
                f"between GPUs, torch sends by NCCL, which needs one for each rank, and {ranks} "
                f"ranks a node share {gpus}; choose the transport mpi, or as many GPUs as ranks"
            )

    def _check_command(self) -> None:
        if not self.command or not self.command[0]:
            raise ValueError(
                "there is no program to run; write it behind --, as in -- python train.py"
            )
        program = PurePath(self.command[0]).name
        if program in LAUNCHERS:
            raise ValueError(
                f"{program} starts ranks, as the script does; give the program of one rank, as in "
                "-- python train.py"
            )

    @property
    def ranks(self) -> int:
        """Return the number of all ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def title(self) -> str:
        """Return the name of the job: as given, or that of the program's script or module."""
        if self.name is not None:
            return self.name
        words = list(self.command)
        if PurePath(words[0]).name.startswith("python") and len(words) > 1:
            words = [w for w in words[1:] if not w.startswith("-")] or words
        stem = PurePath(words[0]).name.removesuffix(".py")
        return re.sub(r"[^\w.-]", "-", stem) or "distconv"

    @property
    def carrier(self) -> str:
        """Return the transport: as given, or what suits the GPUs."""
        own_gpu = self.gpus_per_node == self.ranks_per_node
        return self.transport or ("torch" if own_gpu else "mpi")

    @property
    def clock(self) -> str:
        """Return the time limit as hours:minutes."""
        return f"{self.minutes // 60:02d}:{self.minutes % 60:02d}"

    @property
    def program(self) -> str:
        """Return the command as a shell reads it."""
        return shlex.join(self.command)


CORES_OF_THE_NODE = "$(lscpu --parse=CORE,SOCKET | grep -v '^#' | sort -u | wc -l)"
"""The physical cores of the node on which the script runs, as a shell counts them."""


def _assembled(
    job: BatchJob, prefix: str, directives: Iterable[str], launch: Sequence[str], note: str
) -> str:
    """Return a script: directives of the scheduler, what is set up, and the start of the ranks.

    Parameters
    ----------
    prefix: begins a line that the scheduler reads, such as "#SBATCH".
    launch: the command that starts the ranks, with its options; `$cores` are those of a rank.
    note: why the options are as they are.
    """
    lines = ["#!/bin/bash"]
    lines += [f"{prefix} {directive}" for directive in (*directives, *job.directives)]
    lines += ["", *([job.origin] if job.origin else []), "set -e", *job.setup]
    lines += ["", *_cores(job), "export OMP_NUM_THREADS=$cores"]
    lines += [f"export {name}={value}" for name, value in _variables(job).items()]
    lines += ["", *(f"# {line}" for line in note.splitlines())]
    lines += [" \\\n    ".join([*launch, job.program]), ""]
    return "\n".join(lines)


def _cores(job: BatchJob) -> list[str]:
    if job.cores_per_rank is not None:
        return [f"cores={job.cores_per_rank}"]
    ranks = job.ranks_per_node
    return [
        "# The cores of a node in equal parts, hardware threads not counted.",
        f"cores=$(( {CORES_OF_THE_NODE} / {ranks} ))",
        f'[ "$cores" -ge 1 ] || {{ echo "a node has fewer cores than its {ranks} ranks" >&2; '
        "exit 1; }",
    ]


def _variables(job: BatchJob) -> dict[str, str]:
    """Return what the environment of the ranks has to say."""
    host = {} if job.gpus_per_node else ALLOCATOR
    return {"DISTCONV_TRANSPORT": job.carrier, **host}


def slurm_script(job: BatchJob) -> str:
    """Return the script that `sbatch` takes; `srun` starts the ranks in it."""
    directives = [
        f"--job-name={job.title}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.ranks_per_node}",
        f"--time={job.clock}:00",
        "--exclusive",
        "--output=%x-%j.out",
    ]
    launch = [
        "trap 'exit 1' ERR\n"
        f"srun --nodes={job.nodes} --ntasks={job.ranks} --ntasks-per-node={job.ranks_per_node}",
        "--cpus-per-task=$cores --threads-per-core=1 --cpu-bind=cores",
        "--distribution=block:block --kill-on-bad-exit=1",
    ]
    note = (
        "Ranks are numbered node by node, so that those of a sample are neighbours. srun takes no\n"
        "number of cores over from sbatch, and ends with 137 where a rank has raised and others\n"
        "were killed: the trap makes that 1."
    )
    if job.cores_per_rank is not None:
        directives.append(f"--cpus-per-task={job.cores_per_rank}")
    if job.gpus_per_node:
        directives.append(f"--gpus-per-node={job.gpus_per_node}")
        launch.append(f"--gpus-per-node={job.gpus_per_node} --gpu-bind=none")
        note += " Every rank sees the GPUs of its node and takes its own."
    if job.account is not None:
        directives.append(f"--account={job.account}")
    if job.queue is not None:
        directives.append(f"--partition={job.queue}")
    if job.mpi is not None:
        launch.append(f"--mpi={job.mpi}")
    return _assembled(job, "#SBATCH", directives, launch, note)


def lsf_script(job: BatchJob) -> str:
    """Return the script that `bsub` takes; `jsrun` starts the ranks in it.

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
    if job.mpi is not None:
        raise ValueError(f"--mpi {job.mpi} is an option of Slurm's srun; jsrun has its own MPI")
    directives = [
        f"-J {job.title}",
        f"-nnodes {job.nodes}",
        f"-W {job.clock}",
        f"-o {job.title}-%J.out",
    ]
    if job.account is not None:
        directives.append(f"-P {job.account}")
    if job.queue is not None:
        directives.append(f"-q {job.queue}")
    launch = [
        f"jsrun --nrs {job.nodes} --rs_per_host 1 --tasks_per_rs {job.ranks_per_node}",
        f"--cpu_per_rs $(( cores * {job.ranks_per_node} )) --gpu_per_rs {job.gpus_per_node}",
        "--launch_distribution packed --bind packed:$cores -X 1",
    ]
    note = (
        "One resource set a node: ranks are numbered node by node, so that those of a sample are\n"
        "neighbours"
    )
    note += ", see the GPUs of their node, and take one each." if job.gpus_per_node else "."
    if job.gpus_per_node and job.carrier == "mpi":
        # Spectrum MPI takes messages that lie on a GPU only where it is told so.
        launch.append('--smpiargs="-gpu"')
    return _assembled(job, "#BSUB", directives, launch, note)


def flux_script(job: BatchJob) -> str:
    """Return the script that `flux batch` takes; `flux run` starts the ranks in it."""
    if job.mpi is not None:
        raise ValueError(f"--mpi {job.mpi} is an option of Slurm's srun; Flux needs none")
    directives = [
        f"--job-name={job.title}",
        f"--nodes={job.nodes}",
        "--exclusive",
        f"--time-limit={job.minutes}m",
        f"--output={job.title}-{{{{id}}}}.out",
    ]
    if job.account is not None:
        directives.append(f"--setattr=system.bank={job.account}")
    if job.queue is not None:
        directives.append(f"--queue={job.queue}")
    launch = [
        f"flux run --nodes={job.nodes} --ntasks={job.ranks} --cores-per-task=$cores",
        "-o cpu-affinity=per-task -o exit-on-error",
    ]
    note = "Ranks are numbered node by node, so that those of a sample are neighbours."
    if job.gpus_per_node:
        # A whole number of GPUs for each task, or the whole node.
        own = job.gpus_per_node == job.ranks_per_node
        launch.append(f"--{'gpus-per-task=1' if own else 'exclusive'} -o gpu-affinity=on")
        note += "\nEvery rank sees the GPUs of its node and takes its own."
    return _assembled(job, "# flux:", directives, launch, note)


class Scheduler(NamedTuple):
    """How a scheduler's scripts are made, and the command that takes them on its standard input."""

    script: Callable[[BatchJob], str]
    submit: tuple[str, ...]


SCHEDULERS = {
    "slurm": Scheduler(slurm_script, ("sbatch",)),
    "lsf": Scheduler(lsf_script, ("bsub",)),
    "flux": Scheduler(flux_script, ("flux", "batch")),
}
