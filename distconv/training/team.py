"""`Team`: the ranks of a job as servers, which hold the parameters, and workers, which train."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from math import prod
from pathlib import Path
from typing import Any
from weakref import finalize

from distconv.data.checkpoint import last_in_common
from distconv.geometry.topology import AXES
from distconv.grid import communicators
from distconv.grid.abort import end_when_abandoned
from distconv.grid.journal import Wait, Waiting
from distconv.grid.process_grid import ProcessGrid
from distconv.grid.ranks import ranks_of
from distconv.grid.stall import Watch, time_limit
from distconv.training.checks import check_count
from distconv.training.requests import leave
from distconv.transport.launch import place_by_torch
from distconv.transport.link import Link, open_links

_teams = count()

SERVER_FOLDER = "server-{rank}"
"""The name of a server rank's folder, to be formatted with its `rank`."""


@dataclass(frozen=True)
class TeamArrangement:
    """The roles of a job's ranks: servers first, then workers, group by group. No communication.

    With several groups, each has a server of its own, and these servers are clients of the first
    server. Raises ValueError if the number of ranks does not fit.

    Attributes
    ----------
    ranks: the number of ranks of the job.
    of_server: the number of ranks of each server.
    groups: the number of groups of workers.
    of_worker: the number of ranks of each worker.
    """

    ranks: int
    of_server: int
    groups: int
    of_worker: int

    def __post_init__(self) -> None:
        workers, left = divmod(self.ranks - self.servers, self.of_worker)
        if left or workers < self.groups:
            fits = self.servers + self.of_worker * max(workers, self.groups)
            raise ValueError(
                f"Team: {self.ranks} ranks cannot be divided into {self.servers} servers and "
                f"{self.of_worker} for each worker, with at least one worker in each of "
                f"{self.groups} group{'s' if self.groups > 1 else ''}; start {fits} ranks, for "
                "example"
            )

    @property
    def servers(self) -> int:
        """Return the number of ranks that are servers."""
        return self.of_server * (self.groups + 1 if self.groups > 1 else 1)

    @property
    def workers(self) -> int:
        """Return the number of workers."""
        return (self.ranks - self.servers) // self.of_worker

    def server_of(self, group: int) -> list[int]:
        """Return the ranks of the server of a group of workers, in the order of `ServerParts`."""
        first = self.of_server * (group + 1 if self.groups > 1 else 0)
        return list(range(first, first + self.of_server))

    def group_of(self, worker: int) -> int:
        """Return the group of a worker; groups differ in size by one worker at most."""
        return worker * self.groups // self.workers

    def ranks_of(self, worker: int) -> list[int]:
        """Return the ranks of a worker, the first of which is connected to the server."""
        first = self.servers + worker * self.of_worker
        return list(range(first, first + self.of_worker))

    def worker_of(self, rank: int) -> int:
        """Return the worker of a rank; negative for a server."""
        return (rank - self.servers) // self.of_worker

    def above(self, rank: int) -> list[int]:
        """Return the ranks of the server of which `rank` is a client, [] for a rank without one."""
        if rank >= self.servers:
            worker = self.worker_of(rank)
            first = rank == self.ranks_of(worker)[0]
            return self.server_of(self.group_of(worker)) if first else []
        return [rank % self.of_server] if rank >= self.of_server else []

    def below(self, rank: int) -> list[int]:
        """Return the ranks that are clients of a rank; [] for a rank of a worker."""
        return [r for r in range(self.ranks) if rank in self.above(r)] if self.serves(rank) else []

    def serves(self, rank: int) -> bool:
        """Return whether a rank belongs to a server, and not to a worker."""
        return rank < self.servers


class Team:
    """The ranks of a job as servers and workers. All ranks of the job create it together.

    A worker is one replica, or several synchronous replicas, on a grid of its own. Workers are not
    synchronized with each other: each trains with the parameters of its server (`serve`, `Worker`).

    Raises ValueError on every rank, if the number of ranks does not fit, or the ranks pass
    different arguments.

    Parameters
    ----------
    servers: the number of ranks of a server. Each rank holds some of the parameters, so that no
        link carries all parameters.
    groups: the number of groups of workers. With several, each has a server of its own, which in
        turn is a client of the first server.
    device: the device of the workers' ranks, as for `ProcessGrid`.
    sample, channel, filter, depth, height, width: the ranks of a worker along each axis. With
        `sample` above 1 a worker is a synchronous group (hybrid SGD; Kurth et al., "Deep learning
        at 15PF", SC 2017).

    Attributes
    ----------
    workers: the number of workers.
    worker: the number of this rank's worker; None for a server.
    grid: the grid of this rank's worker; None for a server.

    Examples
    --------
    >>> team = dc.training.Team(servers=1)  # of 2 ranks: a server and a worker
    >>> team
    Team of 1 worker of 1 rank and 1 server
    >>> team.serves == (team.grid is None)
    True
    """

    def __init__(
        self, *, servers: int = 1, groups: int = 1, device: Any = None, **extents: int
    ) -> None:
        with _watched(*place_by_torch() or (0, 1)):  # also the first meeting of the ranks
            ranks = ranks_of(None)
            if len(ranks) > 1:
                end_when_abandoned()
            comm = communicators.communicator(ranks, f"links {next(_teams)}")
            self._comm = comm
            everyone = comm.allgather(
                (servers, groups, tuple(sorted(extents.items())), time_limit())
            )
        if any(theirs != everyone[0] for theirs in everyone):
            raise ValueError(
                f"Team: servers, groups, extents and DISTCONV_TIMEOUT are "
                f"{', '.join(map(str, everyone))} on the ranks; pass the same on every rank"
            )
        check_count("Team", "servers", servers, 1)
        check_count("Team", "groups", groups, 1)
        for axis, extent in extents.items():
            if axis not in AXES:
                raise ValueError(
                    f"Team: {axis}={extent!r} is not an axis; choose from {', '.join(AXES)}"
                )
            check_count("Team", axis, extent, 1)
        self.arrangement = TeamArrangement(len(ranks), servers, groups, prod(extents.values()))
        self.rank = comm.rank
        self.workers = self.arrangement.workers
        self.serves = self.arrangement.serves(self.rank)
        self.worker: int | None = None
        self.grid: ProcessGrid | None = None
        above, below = self.arrangement.above(self.rank), self.arrangement.below(self.rank)
        links = open_links(comm, above, below, time_limit())
        self.above: Sequence[Link] = [links[rank] for rank in above]
        """The links to the ranks of the server of which this rank is a client."""
        self.below: Sequence[Link] = [links[rank] for rank in below]
        """The links to the clients of this rank."""
        self._leave = finalize(self, leave, self.above, self.below, "its program has ended")
        if not self.serves:
            self.worker = self.arrangement.worker_of(self.rank)
            members: Any = self.arrangement.ranks_of(self.worker)
            shape: dict[str, Any] = extents
            self.grid = ProcessGrid(members, device=device, **shape)

    def folder(self, within: str | os.PathLike[str]) -> Path:
        """Return the subfolder of `within` for this rank of a server, or for this rank's worker."""
        own = f"worker-{self.worker}" if self.grid else SERVER_FOLDER.format(rank=self.rank)
        return Path(within) / own

    def last_saved(self, within: str | os.PathLike[str]) -> Path | None:
        """Return this rank's checkpoint of the last state that all workers and servers have saved.

        The state was saved by `Worker.save`. All ranks of the job call this together, before
        `serve` or making a `Worker`. Returns None if no state is complete.

        Parameters
        ----------
        within: the folder in which the state was saved. The first rank of each worker, and each
            rank of a server, must see it.
        """
        looks = self.grid is None or self.grid.rank == 0
        with _watched(self.rank, self.arrangement.ranks):
            return last_in_common(self.folder(within), self._comm, looks=looks)

    def leave(self, error: BaseException | None = None) -> None:
        """Close all links, once; after an `error`, first report it to servers and clients.

        If the program ends without this call, its end is reported as an error.
        """
        if error is not None and self._leave.detach():
            leave(self.above, self.below, f"{type(error).__name__}: {error}")
        elif self._leave.detach():
            for link in (*self.above, *self.below):
                link.close()

    def __repr__(self) -> str:
        a = self.arrangement
        return (
            f"Team of {a.workers} worker{'s' if a.workers > 1 else ''} of {a.of_worker} "
            f"rank{'s' if a.of_worker > 1 else ''} and {a.servers} "
            f"server{'s' if a.servers > 1 else ''}"
        )


@contextmanager
def _watched(rank: int, size: int) -> Iterator[None]:
    """Report ranks that wait too long for each other within a `with` block.

    `rank` is the number of this rank, `size` the number of ranks of the job.
    """
    waiting = Waiting()
    watch = Watch(rank, size, waiting)
    try:
        with Wait(waiting):
            yield
    finally:
        watch.leave()
        watch.wait_for_others()
