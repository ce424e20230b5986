"""A job's needs of a cluster, whichever scheduler runs it."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import PurePath

LAUNCHERS = ("mpiexec", "mpirun", "srun", "jsrun", "lrun", "flux", "torchrun", "sbatch", "bsub")
"""Programs that start ranks, or jobs; the script does that."""

TRANSPORTS = ("mpi", "torch", "nccl")

_WORD = re.compile(r"[\w.@:%+=-]+")


@dataclass(frozen=True)
class Job:
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
        for what, number in (
            ("nodes", self.nodes),
            ("ranks per node", self.ranks_per_node),
            ("minutes", self.minutes),
            ("cores per rank", 1 if self.cores_per_rank is None else self.cores_per_rank),
        ):
            if number < 1:
                raise ValueError(f"{number} {what} run nothing; give a number from 1")

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
