"""Batch scripts of LSF, with the jsrun of IBM's Job Step Manager."""

from __future__ import annotations

from distconv.tools.batch.job import Job
from distconv.tools.batch.script import assembled


def script(job: Job) -> str:
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
    return assembled(job, "#BSUB", directives, launch, note)
