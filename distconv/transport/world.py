"""All ranks of the job, however they were started."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from distconv.torch_private import default_store
from distconv.transport import launch
from distconv.transport.interface import Communicator
from distconv.transport.torch_groups import TorchCommunicator


def world() -> Communicator:
    """Return the communicator of all ranks that were started together; raises RuntimeError in a
    worker process, which is no rank.

    It is for grids; a program uses `ProcessGrid.comm`. The first call starts MPI, or connects to
    the store of torchrun or of the default group of torch.distributed; where there is neither, the
    process is a rank alone.
    """
    launch.check_is_rank()
    return _world()


def world_if_rank() -> Communicator | None:
    """Return the result of `world`; None in a process that is no rank."""
    try:
        return world()
    except RuntimeError:
        return None


@cache
def _world() -> Communicator:
    if launch.meets_by_torch():
        launch.join()
        return _by_torch()
    if launch.has_mpi():
        from distconv.transport.mpi import MPICommunicator

        return MPICommunicator(launch.mpi().COMM_WORLD, "world")
    return TorchCommunicator(None, 0, (0,), "world")


def _by_torch() -> TorchCommunicator:
    store, rank, size = _meeting()
    from torch.distributed import PrefixStore

    # torchrun keeps its store when it restarts ranks, with the addresses of lost ones.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = PrefixStore(f"distconv {attempt} {size}", store)
    return TorchCommunicator(own, rank, tuple(range(size)), "world")


def _meeting() -> tuple[Any, int, int]:
    """Return the store over which the ranks meet, this rank's number, and the number of ranks."""
    from torch import distributed

    if launch.has_default_group():
        return default_store(), distributed.get_rank(), distributed.get_world_size()
    store, rank, size = next(distributed.rendezvous("env://"))
    return store, rank, size
