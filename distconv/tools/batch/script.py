"""The parts of a batch script that all schedulers have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from distconv.planning.machine import ALLOCATOR
from distconv.tools.batch.job import Job

CORES_OF_THE_NODE = "$(lscpu --parse=CORE,SOCKET | grep -v '^#' | sort -u | wc -l)"
"""The physical cores of the node on which the script runs, as a shell counts them."""


def assembled(
    job: Job, prefix: str, directives: Iterable[str], launch: Sequence[str], note: str
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


def _cores(job: Job) -> list[str]:
    if job.cores_per_rank is not None:
        return [f"cores={job.cores_per_rank}"]
    ranks = job.ranks_per_node
    return [
        "# The cores of a node in equal parts, hardware threads not counted.",
        f"cores=$(( {CORES_OF_THE_NODE} / {ranks} ))",
        f'[ "$cores" -ge 1 ] || {{ echo "a node has fewer cores than its {ranks} ranks" >&2; '
        "exit 1; }",
    ]


def _variables(job: Job) -> dict[str, str]:
    """Return what the environment of the ranks has to say."""
    host = {} if job.gpus_per_node else ALLOCATOR
    return {"DISTCONV_TRANSPORT": job.carrier, **host}
