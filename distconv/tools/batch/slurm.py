"""Batch scripts of Slurm."""

from __future__ import annotations

from distconv.tools.batch.job import Job
from distconv.tools.batch.script import assembled


def script(job: Job) -> str:
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
    return assembled(job, "#SBATCH", directives, launch, note)
