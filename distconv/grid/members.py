"""The ranks of a grid, from the communicator or group that a program passes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from distconv.transport.interface import Communicator
from distconv.transport.launch import check_launch
from distconv.transport.torch_groups import TorchCommunicator
from distconv.transport.world import world


def ranks_of(comm: Any) -> tuple[int, ...]:
    """Return the ranks of what `ProcessGrid` takes as `comm`, by their numbers in the job."""
    job = world()
    if isinstance(comm, (range, list, tuple)):
        return _by_number(comm, job)
    if comm is None:
        check_launch(job.size)
        return job.ranks
    if not isinstance(job, TorchCommunicator):
        return _of_mpi(comm)
    if isinstance(comm, TorchCommunicator):
        return comm.ranks
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(comm, distributed.ProcessGroup):
        return tuple(distributed.get_process_group_ranks(comm))
    raise TypeError(
        f"ProcessGrid: comm={comm!r} is no process group of torch.distributed, which has started "
        "the ranks; pass one, or none for all ranks"
    )


def _by_number(numbers: Sequence[Any], job: Communicator) -> tuple[int, ...]:
    wrong = [n for n in numbers if not isinstance(n, int) or not 0 <= n < job.size]
    if wrong or len(set(numbers)) < len(numbers):
        raise ValueError(
            f"ProcessGrid: comm={numbers!r} are not ranks of the job; give different numbers from "
            f"0 to {job.size - 1}"
        )
    if job.rank not in numbers:
        raise ValueError(
            f"ProcessGrid: this rank, {job.rank}, is not among {numbers!r}; make the grid on its "
            "members only"
        )
    return tuple(numbers)


def _of_mpi(comm: Any) -> tuple[int, ...]:
    from distconv.transport.mpi import MPI, world_ranks

    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(
            f"ProcessGrid: comm={comm!r} is no intracommunicator of mpi4py; pass MPI.COMM_WORLD, "
            "or what Split and Create_group make of it"
        )
    if comm == MPI.COMM_NULL:
        raise ValueError(
            "ProcessGrid: this rank is not a member of comm, which is MPI.COMM_NULL here; make "
            "the grid on its members only"
        )
    if comm == MPI.COMM_WORLD:
        check_launch(comm.size)
    return world_ranks(comm)
