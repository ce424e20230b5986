"""All ranks of the job, started by MPI or by torch, and the ranks of one grid among them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

from distconv.torch_private import default_store
from distconv.transport import launch
from distconv.transport.interface import Communicator
from distconv.transport.torch_groups import TorchCommunicator


def world() -> Communicator:
    """Return the communicator of all ranks of the job.

    It is for grids; a program uses `ProcessGrid.comm`. The first call starts MPI, or connects to
    the store of torchrun or of torch.distributed's default group. A process that none of these
    has started is the only rank. Raises RuntimeError in a worker process, which is no rank, and
    if the program has not started MPI or has ended it.
    """
    launch.check_is_rank()
    launch.check_mpi_runs()
    return _world()


def world_if_rank() -> Communicator | None:
    """Return `world()`, or None in a worker process, which is no rank."""
    try:
        return world()
    except RuntimeError:
        return None


@cache
def _world() -> Communicator:
    if launch.meets_by_torch():
        launch.note_joined()
        return _by_torch()
    if launch.has_mpi():
        from distconv.transport.mpi import MPICommunicator

        return MPICommunicator(launch.mpi().COMM_WORLD, "world")
    return TorchCommunicator(None, 0, (0,), "world")


def _by_torch() -> TorchCommunicator:
    from torch import distributed

    if launch.has_default_group():
        store = default_store()
        rank, size = distributed.get_rank(), distributed.get_world_size()
    else:
        store, rank, size = next(distributed.rendezvous("env://"))
    # torchrun keeps its store when it restarts ranks, with the addresses of lost ones.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = distributed.PrefixStore(f"distconv {attempt} {size}", store)
    return TorchCommunicator(own, rank, tuple(range(size)), "world")


def ranks_of(comm: Any) -> tuple[int, ...]:
    """Return the numbers in the job of the ranks of `comm`, as `ProcessGrid` takes it."""
    job = world()
    if isinstance(comm, (range, list, tuple)):
        return _by_number(comm, job)
    if comm is None:
        launch.check_launch(job.size)
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
        launch.check_launch(comm.size)
    return world_ranks(comm)
