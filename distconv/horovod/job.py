"""The ranks of a Horovod program, and the announcements that they exchange before collectives.

Before a collective each rank sends its announcement to all others: kind, name and size. An exchange
of announcements is a round, and a collective starts in the round in which the last rank announces
it. Ranks may therefore start named collectives in different orders. Ranks with different
collectives raise an error instead of summing unrelated tensors. A rank without further samples can
add zeros to sums.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from distconv.device.kinds import built_for_amd, built_for_nvidia
from distconv.geometry.topology import AXES
from distconv.grid.process_grid import ProcessGrid
from distconv.grid.words import ranks_in_words
from distconv.tensor.dist_tensor import DistTensor
from distconv.transport import launch

PURPOSE = "horovod"
"""The purpose of all communicators except those of optimizers' gradients."""

_VARIABLES = {
    "HOROVOD_AUTOTUNE": "set bucket_bytes of DistributedOptimizer, the only parameter to tune",
    "HOROVOD_ELASTIC": "save checkpoints, and let torchrun or the scheduler start the job again",
    "HOROVOD_TIMELINE": 'record with distconv.timeline("trace.json"):',
}
"""Environment variables of Horovod that are not supported, and the way out."""

_WITHOUT_EFFECT = ("HOROVOD_TIMELINE", "DYNAMIC")
"""A variable, and the value with which Horovod records nothing until start_timeline is called."""


class HorovodInternalError(RuntimeError):
    """Ranks called collectives that do not match; raised on every rank of the process set."""


class Part(NamedTuple):
    """The size and type of a vector that a collective sums over all ranks.

    Attributes
    ----------
    dtype, device: the names of the vector's type and of its device type.
    wire: the name of the type in which the vector is sent; "" if it is `dtype`.
    """

    elements: int
    dtype: str
    device: str
    wire: str = ""


class Announcement(NamedTuple):
    """A rank's message to all ranks about the collective that it calls.

    Attributes
    ----------
    kind: Horovod's name of the function.
    name: the `name` argument, by which calls are matched; None or "" to match unnamed calls of one
        kind in order.
    detail: everything else that must be the same on every rank.
    parts: the vectors to sum; empty if a rank without samples cannot take part.
    own: values that this rank sends to the others, such as its number of rows.
    """

    kind: str
    name: str | None = None
    detail: tuple[Any, ...] = ()
    parts: tuple[Part, ...] = ()
    own: Any = None

    def __str__(self) -> str:
        shown = map(str, self.detail if self.name is None else (self.name, *self.detail))
        return f"{self.kind}({', '.join(shown)})"


JOINED, _WAITING = Announcement("join"), Announcement("synchronize")
"""The announcements of a rank without samples left, and of a rank that waits for the others."""


class Pending:
    """A collective that this rank has announced, and that starts when all ranks have announced it.

    `start` gets the announcements of all ranks, None for a rank that has joined; it starts the
    collective and returns a function that waits for the result and returns it.
    """

    def __init__(self, job: Job, start: Callable[[list[Announcement | None]], Callable[[], Any]]):
        self._job, self._start = job, start
        self._wait: Callable[[], Any] | None = None

    def start(self, everyone: list[Announcement | None]) -> None:
        """Start the collective, given the announcements of all ranks."""
        self._wait = self._start(everyone)

    def wait(self) -> Any:
        """Exchange announcements until the collective starts; wait for its result and return it."""
        while self._wait is None:
            self._job.round(_WAITING)
        return self._wait()


class Job:
    """The ranks of a process set, and the collectives that the ranks have announced.

    All ranks of the set create it together. `comm` selects the ranks, as in `ProcessGrid`.
    """

    def __init__(self, comm: Any = None):
        self._grids: dict[tuple[str, int], ProcessGrid] = {}
        self.grid = self._grids["cpu", 0] = ProcessGrid(comm, sample=-1, device="cpu")
        self.rank, self.size = self.grid.rank, self.grid.size
        self._control = self.grid.communicator(AXES, f"{PURPOSE} announcements")
        self.hosts: list[str] = self.grid.all_gather_object(socket.gethostname())
        self._forget()

    def _forget(self) -> None:
        """Drop all announcements, after an error or when all ranks have joined."""
        self._announced: dict[tuple[str, str | int], dict[int, Announcement]] = {}
        """By kind and name of each collective that has not started, the announcements by rank."""
        self._pending: dict[tuple[str, str | int], Pending] = {}
        """By kind and name, the collectives in `_announced` that this rank has announced."""
        self._unnamed: list[Counter[str]] = [Counter() for _ in range(self.size)]
        """For each rank, the number of unnamed collectives of each kind so far."""
        self.joined: frozenset[int] = frozenset()
        """The ranks that had no samples left in the last round."""

    def on(self, device: torch.device, root: int = 0) -> ProcessGrid:
        """Return a grid of the job's ranks for tensors on `device`, with rank `root` as its first.

        The first call for a type of device and a root is collective.
        """
        key = device.type, root
        if key not in self._grids:
            ranks = list(self.grid.ranks)
            ranks.insert(0, ranks.pop(root))
            self._grids[key] = ProcessGrid(ranks, sample=-1, device=device)
        return self._grids[key]

    def start(
        self, mine: Announcement, start: Callable[[list[Announcement | None]], Callable[[], Any]]
    ) -> Pending:
        """Announce a collective, which starts in the round in which the last rank announces it.

        All ranks call it, except ranks that have joined. `mine` is this rank's announcement.
        `start` gets the announcements of all ranks, None for a rank that has joined, starts the
        collective, and returns a function that waits for the result and returns it.

        Raises HorovodInternalError on every rank, if the ranks announce collectives that do not
        match, or one that a rank without samples cannot take part in.
        """
        pending = Pending(self, start)
        self.round(mine, pending)
        return pending

    def round(
        self,
        mine: Announcement,
        pending: Pending | None = None,
        absent: Callable[[Announcement], None] | None = None,
    ) -> list[Announcement]:
        """Exchange announcements; start collectives that all ranks have announced. Collective.

        Returns the announcements of all ranks in this round.

        Parameters
        ----------
        pending: the collective that this rank announces by `mine`; None if `mine` announces none.
        absent: on a rank that has joined, a function that takes part in a collective of the other
            ranks, given an announcement of it.
        """
        if pending is not None:
            key = mine.kind, mine.name or self._unnamed[self.rank][mine.kind]
            if key in self._pending:
                raise ValueError(
                    f"distconv.horovod: {mine.kind}: the name {mine.name!r} belongs to a "
                    "collective that is still pending; synchronize it first, or choose another "
                    "name"
                )
            self._pending[key] = pending
        everyone = [mine]
        if self.size > 1:
            with self.grid.waiting():
                everyone = self._control.allgather(mine)
        for rank, theirs in enumerate(everyone):
            if theirs not in (JOINED, _WAITING):
                key = theirs.kind, theirs.name or self._unnamed[rank][theirs.kind]
                if not theirs.name:
                    self._unnamed[rank][theirs.kind] += 1
                self._announced.setdefault(key, {})[rank] = theirs
        joined = frozenset(rank for rank, theirs in enumerate(everyone) if theirs == JOINED)
        self.joined = joined
        ranks = frozenset(range(self.size))
        ready = [
            key for key, by_rank in self._announced.items() if by_rank.keys() | joined == ranks
        ]
        idle = all(theirs in (JOINED, _WAITING) for theirs in everyone)
        if not ready and _WAITING in everyone and idle:
            self._refuse({r: a for ones in self._announced.values() for r, a in ones.items()})
        # In one order on all ranks, independent of the order of the announcements.
        for key in sorted(ready, key=str):
            by_rank = self._announced.pop(key)
            first = self._checked(by_rank, joined)
            own = self._pending.pop(key, None)
            if own is not None:
                own.start([by_rank.get(rank) for rank in range(self.size)])
            elif absent is not None:
                absent(first)
        if joined == ranks:
            self._forget()
        return everyone

    def _checked(self, by_rank: dict[int, Announcement], joined: frozenset[int]) -> Announcement:
        """Check that the announcements of a collective are equal, and return one of them.

        `by_rank` has the announcements by rank, and `joined` the ranks without further samples.
        Raises HorovodInternalError as `start` does.
        """
        first = by_rank[min(by_rank)]
        if any(theirs[:4] != first[:4] for theirs in by_rank.values()):
            self._refuse(by_rank)
        if joined and not first.parts:
            self._forget()
            raise HorovodInternalError(
                f"distconv.horovod: {ranks_in_words(sorted(by_rank))} called {first.kind} while "
                f"{ranks_in_words(sorted(joined))} had called join(); ranks that have joined take "
                f"part in sums and averages only: call {first.kind} before the loop, or after "
                "join()"
            )
        return first

    def _refuse(self, by_rank: dict[int, Announcement]) -> NoReturn:
        """Raise HorovodInternalError, naming two ranks of `by_rank` whose announcements differ."""
        self._forget()
        a = min(by_rank)
        b = next((r for r in sorted(by_rank) if by_rank[r][:4] != by_rank[a][:4]), a)
        other = (
            f"rank {a} calls {by_rank[a]}" if b != a else "other ranks wait for other collectives"
        )
        raise HorovodInternalError(
            f"distconv.horovod: rank {b} calls {by_rank[b]}, but {other}; call the same functions "
            "with tensors of the same shapes and types on every rank, in the same order, or under "
            "the same names"
        )


def check_environment() -> None:
    """Raise NotImplementedError if an environment variable asks for an unsupported feature."""
    for name, way_out in _VARIABLES.items():
        if launch.switched_on(name) and (name, os.environ[name]) != _WITHOUT_EFFECT:
            raise NotImplementedError(
                f"distconv.horovod: {name}={os.environ[name]} is not supported; unset it, and "
                f"{way_out}"
            )


def refuse_dist_tensors(caller: str, *tensors: Tensor) -> None:
    """Raise `TypeError` unless all of `tensors` are plain; `caller` begins the message."""
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or isinstance(tensor, DistTensor):
            raise TypeError(
                f"distconv.horovod.{caller}: {type(tensor).__name__} is not a plain tensor; "
                "convert values by torch.tensor, and a DistTensor by x.full_tensor(), which is "
                "already the same on all ranks"
            )


# The process sets of a Horovod program, and queries about its ranks and nodes.


class ProcessSet:
    """Some ranks of the job, which call collectives together.

    Parameters
    ----------
    ranks_or_comm: the numbers of the ranks in the job. Communicators are not supported.

    Attributes
    ----------
    process_set_id: the number of the set; None before it is added, and after it is removed.
    ranks: the numbers of the ranks in the job, in increasing order.

    Examples
    --------
    >>> import distconv.horovod as hvd
    >>> hvd.init()
    >>> first = hvd.add_process_set(hvd.ProcessSet([0]))
    >>> if hvd.rank() == 0:
    ...     total = hvd.allreduce(torch.ones(1), process_set=first)  # of rank 0 alone
    >>> hvd.get_process_set_ids_and_ranks(), hvd.global_process_set.ranks
    ({0: [0, 1], 1: [0]}, [0, 1])
    >>> hvd.remove_process_set(first)
    True
    """

    def __init__(self, ranks_or_comm: Iterable[int]):
        self.process_set_id: int | None = None
        given = ranks_or_comm
        numbers = list(given) if isinstance(given, Iterable) else [None]
        if not all(isinstance(rank, int) for rank in numbers):
            raise ValueError(
                f"distconv.horovod: ProcessSet({given!r}) names no ranks; pass rank numbers, such "
                "as [0, 1]"
            )
        self.ranks: list[int] = sorted(numbers)
        self._job: Job | None = None

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def rank(self) -> int:
        """Return this rank's position in the set; raise ValueError if the set does not have it."""
        return self.job.rank

    def size(self) -> int:
        """Return the number of ranks in the set."""
        return len(self.ranks)

    def included(self) -> bool:
        """Return whether this rank is in the set."""
        return self._job is not None

    @property
    def job(self) -> Job:
        """Return the `Job` of the set's ranks; raise ValueError if this rank is not in the set."""
        if self._job is None:
            raise ValueError(
                "distconv.horovod: distconv.horovod is not initialized; call init() first"
                if not _sets
                else f"distconv.horovod: this rank is not in {self}; only ranks of a process set "
                "call its collectives. Create a set with this rank by add_process_set"
            )
        return self._job

    def assign(self, number: int | None, job: Job | None) -> None:
        """Set the `number` of the set, and the `job` of its ranks: None on a rank outside the set.

        Both are None once the set is removed.
        """
        self.process_set_id, self._job = number, job


global_process_set = ProcessSet([])
"""All ranks of the job."""

_sets: dict[int, ProcessSet] = {}
"""The process sets by their numbers; empty before `init`."""


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Connect the ranks. All ranks call `init` together; a second call does nothing.

    Parameters
    ----------
    comm: the ranks: a communicator of mpi4py, or numbers of ranks; by default all ranks of the job.
    process_sets: the sets to add, in this order. "dynamic" is accepted and has no effect: sets may
        be added later in any case.

    Raises
    ------
    NotImplementedError
        If environment variables ask for autotuning, elastic training or Horovod's timeline.

    Examples
    --------
    >>> import distconv.horovod as hvd
    >>> hvd.init()
    >>> hvd.is_initialized(), hvd.size(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
    (True, 2, 2, 0, 1)
    >>> hvd.allgather_object((hvd.rank(), hvd.local_rank()))  # both ranks on one node
    [(0, 0), (1, 1)]
    >>> hvd.is_homogeneous(), hvd.mpi_enabled() != hvd.gloo_enabled()
    (True, True)
    >>> hvd.shutdown()
    """
    check_environment()
    if _sets:
        return
    _sets[0] = global_process_set
    global_process_set.assign(0, Job(comm))
    global_process_set.ranks = list(range(global_process_set.job.size))
    for process_set in () if isinstance(process_sets, str) else process_sets or ():
        add_process_set(process_set)


def shutdown() -> None:
    """Remove all process sets; `init` may be called again."""
    for process_set in _sets.values():
        process_set.assign(None, None)
    _sets.clear()


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Add a process set and return it. All ranks of the job call it together.

    Raises
    ------
    ValueError
        On every rank, if the ranks name different sets, or one that exists, is empty, or has ranks
        outside the job.
    """
    job = current()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    everyone = job.grid.all_gather_object(added.ranks)
    if any(ranks != everyone[0] for ranks in everyone):
        raise ValueError(
            f"distconv.horovod: ranks add different process sets, {everyone}; pass the same on "
            "every rank"
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
    added.assign(max(_sets) + 1, own)
    _sets[max(_sets) + 1] = added
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set, and return whether there was one. All ranks call it together.

    The set of all ranks stays.
    """
    number = process_set.process_set_id
    if not number or number not in _sets:
        return False
    _sets.pop(number).assign(None, None)
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
    """Return this node's number among the nodes that have a rank with the same local rank."""
    return _nodes_before(current().rank)


def cross_size() -> int:
    """Return the number of nodes that have a rank with the same local rank as this rank."""
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
    """Return whether torch is built with gloo, which sends messages without MPI."""
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


def nccl_built() -> int:
    """Return 1 if torch is built with NCCL, else 0."""
    return int(torch.distributed.is_available() and torch.distributed.is_nccl_available())


def mpi_threads_supported() -> bool:
    """Return False: only one thread of a rank may send messages.

    The names `ddl_built` and `ccl_built` refer to this function, as both are False for this
    library.

    Examples
    --------
    >>> import distconv.horovod as hvd
    >>> hvd.mpi_threads_supported(), hvd.ddl_built(), hvd.ccl_built()
    (False, False, False)
    >>> hvd.gloo_built(), hvd.nccl_built() in (0, 1)
    (True, True)
    """
    return False


ddl_built = ccl_built = mpi_threads_supported
mpi_built, cuda_built, rocm_built = launch.has_mpi, built_for_nvidia, built_for_amd
