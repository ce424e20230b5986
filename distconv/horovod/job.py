"""The ranks of a Horovod program, and what all of them are told before they do it together.

Each collective begins with a small message between all ranks: what it is, and of what size. So
ranks that do different things raise, instead of adding up what does not belong together, and a rank
whose samples have come to an end knows what the others are about to add up, and adds zeros.
"""

from __future__ import annotations

import os
import socket
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distconv.geometry.topology import AXES
from distconv.grid.order import ranks_in_words
from distconv.grid.process_grid import ProcessGrid
from distconv.tensor.dist_tensor import DistTensor
from distconv.transport import launch

PURPOSE = "horovod"
"""The communicators of everything but the gradients of optimizers."""

_VARIABLES = {
    "HOROVOD_AUTOTUNE": "there is nothing to tune but bucket_bytes of DistributedOptimizer",
    "HOROVOD_ELASTIC": "save checkpoints, and let torchrun or the scheduler start the job again",
    "HOROVOD_TIMELINE": 'record with distconv.timeline("trace.json"):',
}
"""Variables that ask Horovod for what is not here, and the way out."""


class Part(NamedTuple):
    """A vector of which every rank has a summand.

    Attributes
    ----------
    dtype, device: the type of its elements, and the kind of device, by their names.
    wire: the type in which it travels, where that is another.
    """

    elements: int
    dtype: str
    device: str
    wire: str = ""


class Announcement(NamedTuple):
    """A rank's next step, as it tells the others.

    Attributes
    ----------
    kind: the function, by the name that Horovod gives it.
    detail: all else that has to be the same on every rank.
    parts: what is added up; nothing, where a rank without samples cannot take part.
    own: what only this rank knows.
    """

    kind: str
    detail: tuple[Any, ...] = ()
    parts: tuple[Part, ...] = ()
    own: Any = None

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(map(str, self.detail))})"


JOINED = Announcement("join")


class Job:
    """All ranks, of which each has samples of its own.

    Parameters
    ----------
    comm: the ranks, as `ProcessGrid` takes them. All of them make it together.
    """

    def __init__(self, comm: Any = None):
        self._grids: dict[tuple[str, int], ProcessGrid] = {}
        self.grid = self._grids["cpu", 0] = ProcessGrid(comm, sample=-1, device="cpu")
        self.rank, self.size = self.grid.rank, self.grid.size
        self._control = self.grid.communicator(AXES, f"{PURPOSE} announcements")
        self.hosts: list[str] = self.grid.all_gather_object(socket.gethostname())
        self.joined: frozenset[int] = frozenset()
        """The ranks that had no samples left at the last announcement."""

    def on(self, device: torch.device, root: int = 0) -> ProcessGrid:
        """Return the grid for tensors on a kind of device, whose first rank is `root`.

        All ranks ask for it together at first.
        """
        key = device.type, root
        if key not in self._grids:
            ranks = list(self.grid.ranks)
            ranks.insert(0, ranks.pop(root))
            self._grids[key] = ProcessGrid(ranks, sample=-1, device=device)
        return self._grids[key]

    def announce(self, mine: Announcement) -> list[Announcement]:
        """Return what every rank is about to do, in rank order; all ranks call it together.

        Raises
        ------
        RuntimeError
            On every rank, where they are about to do different things, or what a rank without
            samples cannot take part in.
        """
        if self.size == 1:
            return [mine]
        with self.grid.waiting():
            everyone: list[Announcement] = self._control.allgather(mine)
        active = [rank for rank, theirs in enumerate(everyone) if theirs.kind != JOINED.kind]
        if not active:
            return everyone
        self.joined = frozenset(range(self.size)) - frozenset(active)
        first = everyone[active[0]]
        for rank in active:
            if everyone[rank][:3] != first[:3]:
                raise RuntimeError(
                    f"distconv.horovod: rank {rank} calls {everyone[rank]} where rank {active[0]} "
                    f"calls {first}; call the same functions in the same order, with tensors of "
                    "the same shapes and types, on every rank"
                )
        if self.joined and not first.parts:
            raise RuntimeError(
                f"distconv.horovod: {ranks_in_words(active)} called {first.kind} while "
                f"{ranks_in_words(sorted(self.joined))} had called join(); ranks that have joined "
                "take part in sums and averages only: call it before the loop, or after join()"
            )
        return everyone


_jobs: list[Job] = []
"""The job of this process, when it has been initialised."""


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Meet the other ranks, which call it together; a second call does nothing.

    Parameters
    ----------
    comm: the ranks: a communicator of mpi4py or numbers of ranks; all of the job when not given.

    Raises
    ------
    NotImplementedError
        Where process sets, or by environment variables autotuning or elastic training, are asked
        for.
    """
    if process_sets is not None:
        raise NotImplementedError(
            "distconv.horovod: there are no process sets; make a distconv.ProcessGrid on some of "
            "the ranks, ProcessGrid([0, 1], sample=2)"
        )
    for name, way_out in _VARIABLES.items():
        if launch.switched_on(name):
            raise NotImplementedError(
                f"distconv.horovod: {name}={os.environ[name]} asks for what is not here; unset it, "
                f"and {way_out}"
            )
    if not _jobs:
        _jobs.append(Job(comm))


def shutdown() -> None:
    """Leave the job; `init` may follow."""
    _jobs.clear()


def is_initialized() -> bool:
    """Return whether `init` has been called."""
    return bool(_jobs)


def current() -> Job:
    """Return the job; raise `ValueError` before `init`."""
    if not _jobs:
        raise ValueError("distconv.horovod: the ranks have not met yet; call init() before")
    return _jobs[0]


def rank() -> int:
    """Return the number of this rank."""
    return current().rank


def size() -> int:
    """Return the number of ranks."""
    return current().size


def local_rank() -> int:
    """Return the number of this rank among those of its node."""
    job = current()
    return job.hosts[: job.rank].count(job.hosts[job.rank])


def local_size() -> int:
    """Return the number of ranks on this node."""
    job = current()
    return job.hosts.count(job.hosts[job.rank])


def cross_rank() -> int:
    """Return the number of this node among those that have a rank with this local rank."""
    return _nodes_before(current().rank)


def cross_size() -> int:
    """Return the number of nodes that have a rank with this local rank."""
    return _nodes_before(current().size)


def _nodes_before(end: int) -> int:
    job, mine = current(), local_rank()
    return sum(job.hosts[:r].count(job.hosts[r]) == mine for r in range(end))


def is_homogeneous() -> bool:
    """Return whether all nodes have the same number of ranks."""
    hosts = current().hosts
    return len({hosts.count(host) for host in hosts}) == 1


def mpi_enabled() -> bool:
    """Return whether MPI has started the ranks."""
    current()
    return launch.has_mpi() and not launch.meets_by_torch()


def gloo_enabled() -> bool:
    """Return whether torch has started the ranks, without MPI."""
    return not mpi_enabled()


def mpi_built() -> bool:
    """Return whether there is an MPI."""
    return launch.has_mpi()


def gloo_built() -> bool:
    """Return whether torch has gloo, which carries messages without MPI."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_gloo_available()


def ddl_built() -> bool:
    """Return False: there is no carrier by IBM's DDL."""
    return False


def ccl_built() -> bool:
    """Return False: there is no carrier by Intel's oneCCL."""
    return False


def mpi_threads_supported() -> bool:
    """Return False: one thread of a rank sends messages."""
    return False


def nccl_built() -> int:
    """Return 1 where torch has NCCL, and else 0."""
    distributed = torch.distributed
    return int(distributed.is_available() and distributed.is_nccl_available())


def cuda_built() -> bool:
    """Return whether torch can use Nvidia's GPUs."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch can use AMD's GPUs."""
    return torch.version.hip is not None


def check_plain(caller: str, *tensors: Tensor) -> None:
    """Raise `TypeError` for anything but a plain tensor, of which every rank has one of its own."""
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or isinstance(tensor, DistTensor):
            raise TypeError(
                f"distconv.horovod.{caller}: {type(tensor).__name__} is no plain tensor; convert "
                "values by torch.tensor, and take x.full_tensor() of a DistTensor, which is the "
                "same on all ranks already"
            )
