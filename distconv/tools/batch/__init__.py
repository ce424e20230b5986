"""Batch scripts that start a program on the nodes of a cluster, a file a scheduler."""

from collections.abc import Callable
from typing import NamedTuple

from distconv.tools.batch import flux, lsf, slurm
from distconv.tools.batch.job import Job


class Scheduler(NamedTuple):
    """How a scheduler's scripts are made, and the command that takes them on its standard input."""

    script: Callable[[Job], str]
    submit: tuple[str, ...]


SCHEDULERS = {
    "slurm": Scheduler(slurm.script, ("sbatch",)),
    "lsf": Scheduler(lsf.script, ("bsub",)),
    "flux": Scheduler(flux.script, ("flux", "batch")),
}

__all__ = ["SCHEDULERS", "Job", "Scheduler"]
