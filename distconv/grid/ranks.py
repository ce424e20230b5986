"""The communicator of all ranks of the job, started by MPI or torch, and the ranks of a grid."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from concurrent import futures
from datetime import timedelta
from functools import cache
from numbers import Number
from threading import Thread
from typing import Any

from distconv.geometry.topology import AXES
from distconv.grid.stall import time_limit_or_default
from distconv.torch_private import default_store
from distconv.transport import launch
from distconv.transport.interface import Communicator
from distconv.transport.torch import NO_LIMIT, TorchCommunicator

_LATE = 2.0
"""Seconds allowed after the time limit for torch to raise its own error about a missing rank."""


def world() -> Communicator:
    """Return the communicator of all ranks of the job.

    Grids use this communicator; a program uses `ProcessGrid.comm`. The first call starts MPI, or
    connects to the store of torchrun or of torch.distributed's default group. A process started
    without MPI and torchrun is the only rank. Raises RuntimeError in a worker process, which is not
    a rank, and if MPI has not been initialized or has been finalized.
    """
    launch.check_is_rank()
    job = _world()
    if not isinstance(job, TorchCommunicator):
        launch.check_mpi_runs()
    return job


def world_if_rank() -> Communicator | None:
    """Return the communicator of all ranks of the job, or None in a process that is not a rank."""
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
        launch.check_mpi_runs()
        launch.keep_launcher_from_children()
        from distconv.transport.mpi import MPICommunicator

        return MPICommunicator(launch.mpi().COMM_WORLD, "world")
    return TorchCommunicator(None, 0, (0,), "world")


def _by_torch() -> TorchCommunicator:
    from torch import distributed

    if launch.has_default_group():
        store = default_store()
        rank, size = distributed.get_rank(), distributed.get_world_size()
    else:
        store, rank, size = _met_by_environment()
    # torchrun keeps its store when it restarts ranks, with the addresses of lost ones.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = distributed.PrefixStore(f"distconv {attempt} {size}", store)
    return TorchCommunicator(own, rank, tuple(range(size)), "world")


def _met_by_environment() -> tuple[Any, int, int]:
    """Return torch's key-value store at MASTER_ADDR, this process's rank, and the number of ranks.

    Raises RuntimeError if the ranks have not connected within DISTCONV_TIMEOUT seconds, and
    ValueError if RANK is not a rank of WORLD_SIZE. Collective.
    """
    from torch import distributed

    place = launch.place_by_torch()
    if place is None or place[0] >= place[1]:
        rank, size = (os.environ[name] for name in ("RANK", "WORLD_SIZE"))
        raise ValueError(
            f"ProcessGrid: RANK={rank} is not a rank of WORLD_SIZE={size}; set RANK to a number "
            "from 0 to WORLD_SIZE - 1 on each rank, or start the program by torchrun"
        )
    limit = time_limit_or_default()
    waited = timedelta(seconds=min(limit, NO_LIMIT.total_seconds()))
    met: futures.Future[tuple[Any, int, int]] = futures.Future()

    def meet() -> None:
        try:
            met.set_result(next(distributed.rendezvous("env://", timeout=waited)))
        except Exception as error:
            met.set_exception(error)

    # In a thread, as torch waits forever for an answer if another program uses the port.
    Thread(target=meet, name="distconv meeting", daemon=True).start()
    try:
        return met.result(waited.total_seconds() + _LATE)
    except (RuntimeError, ValueError, futures.TimeoutError) as error:
        address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        why = (str(error) or "no answer").splitlines()[0]
        raise RuntimeError(
            f"ProcessGrid: rank {place[0]} could not connect to the other ranks of "
            f"WORLD_SIZE={place[1]} at MASTER_ADDR={address}, MASTER_PORT={port} within "
            f"DISTCONV_TIMEOUT={limit:g} seconds ({why}). Start all ranks, "
            "with the address of rank 0's host and a free port of that host"
        ) from error


def ranks_of(comm: Any) -> tuple[int, ...]:
    """Return the job's numbers of the ranks of `comm`, the argument of `ProcessGrid`.

    Raises TypeError for a `comm` of an unsupported type, and ValueError for numbers that are not
    ranks of the job, or do not include this rank.
    """
    job = world()
    if isinstance(comm, (range, list, tuple)):
        return _by_number(comm, job)
    if comm is None:
        launch.check_launch(job.size)
        if notice := launch.notice_of_tasks(job.size):
            warnings.warn(f"ProcessGrid: {notice}", stacklevel=3)
        return job.ranks
    if isinstance(comm, Number):
        raise TypeError(
            f"ProcessGrid: {comm} is a number without an axis; name the axis, as in "
            f"ProcessGrid(sample={comm}); the axes are {', '.join(AXES)}"
        )
    if not isinstance(job, TorchCommunicator):
        return _of_mpi(comm)
    if isinstance(comm, TorchCommunicator):
        return comm.ranks
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(comm, distributed.ProcessGroup):
        return tuple(distributed.get_process_group_ranks(comm))
    raise TypeError(
        f"ProcessGrid: comm={comm!r} is not a process group of torch.distributed, which started "
        "the ranks; pass a process group, or leave comm out for all ranks"
    )


def _by_number(numbers: Sequence[Any], job: Communicator) -> tuple[int, ...]:
    wrong = [n for n in numbers if not isinstance(n, int) or not 0 <= n < job.size]
    if wrong or len(set(numbers)) < len(numbers):
        raise ValueError(
            f"ProcessGrid: comm={numbers!r} are not ranks of the job; choose different numbers "
            f"from 0 to {job.size - 1}"
        )
    if job.rank not in numbers:
        raise ValueError(
            f"ProcessGrid: this rank, {job.rank}, is not among {numbers!r}; create the grid on "
            "its members only"
        )
    return tuple(numbers)


def _of_mpi(comm: Any) -> tuple[int, ...]:
    from distconv.transport.mpi import MPI, world_ranks

    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(
            f"ProcessGrid: comm={comm!r} is not an intracommunicator of mpi4py; pass "
            "MPI.COMM_WORLD, or a result of its Split or Create_group"
        )
    if comm == MPI.COMM_NULL:
        raise ValueError(
            "ProcessGrid: this rank is not a member of comm, which is MPI.COMM_NULL here; create "
            "the grid on its members only"
        )
    if comm == MPI.COMM_WORLD:
        launch.check_launch(comm.size)
    return world_ranks(comm)
