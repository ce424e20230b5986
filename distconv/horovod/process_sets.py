"""The process sets of a Horovod program, and queries about its ranks and nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from distconv.device.kinds import built_for_amd, built_for_nvidia
from distconv.horovod.job import Job, check_environment
from distconv.transport import launch


class ProcessSet:
    """Some ranks of the job, which call collectives together.

    Parameters
    ----------
    ranks_or_comm: their numbers in the job. Communicators are not supported.

    Attributes
    ----------
    process_set_id: the number of the set; None before it is added, and after it is removed.
    ranks: the numbers in increasing order.
    """

    def __init__(self, ranks_or_comm: Iterable[int]):
        self.process_set_id: int | None = None
        given = ranks_or_comm
        numbers = list(given) if isinstance(given, Iterable) else [None]
        if not all(isinstance(rank, int) for rank in numbers):
            raise ValueError(
                f"distconv.horovod: ProcessSet({given!r}) names no ranks; give numbers, as [0, 1]"
            )
        self.ranks: list[int] = sorted(numbers)
        self._job: Job | None = None

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def rank(self) -> int:
        """Return this rank's position in the set; raise ValueError if it is not in it."""
        return self.job.rank

    def size(self) -> int:
        """Return the number of ranks in the set."""
        return len(self.ranks)

    def included(self) -> bool:
        """Return whether this rank is in the set."""
        return self._job is not None

    @property
    def job(self) -> Job:
        """Return the `Job` of the ranks of the set; raise ValueError if this rank is not in it."""
        if self._job is None:
            raise ValueError(
                "distconv.horovod: the ranks have not met yet; call init() before"
                if not _sets
                else f"distconv.horovod: this rank is not in {self}; add_process_set makes a set, "
                "and only its ranks call its collectives"
            )
        return self._job

    def begin(self, number: int, job: Job | None) -> None:
        """Give the set its `number`, and the `job` of its ranks: None on a rank outside the set."""
        self.process_set_id, self._job = number, job

    def end(self) -> None:
        """Take number and job from the set."""
        self.process_set_id, self._job = None, None


global_process_set = ProcessSet([])
"""All ranks of the job."""

_sets: dict[int, ProcessSet] = {}
"""The process sets by their numbers; empty before `init`."""


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Connect the ranks. All of them call it together; a second call does nothing.

    Parameters
    ----------
    comm: the ranks: a communicator of mpi4py or numbers of ranks; all of the job when not given.
    process_sets: the sets to add, in this order. "dynamic" is accepted and has no effect: sets may
        be added later in any case.

    Raises
    ------
    NotImplementedError If environment variables ask for autotuning, elastic training or Horovod's
    timeline.
    """
    check_environment()
    if _sets:
        return
    _sets[0] = global_process_set
    global_process_set.begin(0, Job(comm))
    global_process_set.ranks = list(range(global_process_set.job.size))
    for process_set in () if isinstance(process_sets, str) else process_sets or ():
        add_process_set(process_set)


def shutdown() -> None:
    """Remove all process sets; `init` may be called again."""
    for process_set in _sets.values():
        process_set.end()
    _sets.clear()


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Add a process set and return it. All ranks of the job call it together.

    Raises
    ------
    ValueError On every rank, if the ranks name different sets, or one that exists, is empty, or has
    ranks outside the job.
    """
    job = current()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    everyone = job.grid.all_gather_object(added.ranks)
    if any(ranks != everyone[0] for ranks in everyone):
        raise ValueError(
            f"distconv.horovod: ranks add different process sets, {everyone}; give all the same"
        )
    known = next((s for s in _sets.values() if s.ranks == added.ranks), None)
    if known is not None or not set(added.ranks) <= set(range(job.size)) or not added.ranks:
        raise ValueError(
            f"distconv.horovod: {added} "
            + ("exists already" if known else f"needs different ranks from 0 to {job.size - 1}")
        )
    own = None
    if job.rank in added.ranks:
        own = Job([job.grid.ranks[rank] for rank in added.ranks])
    added.begin(max(_sets) + 1, own)
    _sets[max(_sets) + 1] = added
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set, and return whether there was one. All ranks call it together.

    The set of all ranks stays.
    """
    number = process_set.process_set_id
    if not number or number not in _sets:
        return False
    _sets.pop(number).end()
    return True


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Return the ranks of each process set, by the number of the set."""
    return {number: list(process_set.ranks) for number, process_set in _sets.items()}


def is_initialized() -> bool:
    """Return whether `init` has been called."""
    return bool(_sets)


def current() -> Job:
    """Return the job of all ranks; raise ValueError before `init`."""
    return global_process_set.job


def rank() -> int:
    """Return the number of this rank in the job."""
    return current().rank


def size() -> int:
    """Return the number of ranks in the job."""
    return current().size


def local_rank() -> int:
    """Return the number of this rank on its node."""
    job = current()
    return job.hosts[: job.rank].count(job.hosts[job.rank])


def local_size() -> int:
    """Return the number of ranks on this node."""
    job = current()
    return job.hosts.count(job.hosts[job.rank])


def cross_rank() -> int:
    """Return the number of this node among the nodes that have a rank with this local rank."""
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
    """Return whether the ranks exchange messages by MPI."""
    current()
    return launch.has_mpi() and not launch.meets_by_torch()


def gloo_enabled() -> bool:
    """Return whether the ranks exchange messages by torch.distributed, without MPI."""
    return not mpi_enabled()


def gloo_built() -> bool:
    """Return whether torch has gloo, which carries messages without MPI."""
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


def nccl_built() -> int:
    """Return 1 if torch has NCCL, else 0."""
    return int(torch.distributed.is_available() and torch.distributed.is_nccl_available())


def mpi_threads_supported() -> bool:
    """Return False: only one thread of a rank may send messages.

    It is also Horovod's `ddl_built` and `ccl_built`, which are False for this library.
    """
    return False


ddl_built = ccl_built = mpi_threads_supported
mpi_built, cuda_built, rocm_built = launch.has_mpi, built_for_nvidia, built_for_amd
