"""Batch scripts of Flux."""

from __future__ import annotations

from distconv.tools.batch.job import Job
from distconv.tools.batch.script import assembled


def script(job: Job) -> str:
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
        launch.append(f"{_gpus(job)} -o gpu-affinity=on")
        note += "\nEvery rank sees the GPUs of its node and takes its own."
    return assembled(job, "# flux:", directives, launch, note)


def _gpus(job: Job) -> str:
    """Return how `flux run` is asked for GPUs: a whole number for each task, or the whole node."""
    return "--gpus-per-task=1" if job.gpus_per_node == job.ranks_per_node else "--exclusive"
