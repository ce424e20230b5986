"""Measuring a machine: messages, reductions, copies, packing, and Python; in under a minute.

All ranks take part, as they compute in a job: messages are sent by all pairs at the same time, and
memory is copied by all ranks of a node at once.
"""

from __future__ import annotations

import os
import platform
import random
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from distconv.grid.process_grid import ProcessGrid
from distconv.planning.host_work import measure_host_work
from distconv.planning.machine import LinkTimes, Machine, Table, allocator_here
from distconv.transport.world import world

MESSAGES = (8, 2**10, 2**13, 2**15, 2**16, 2**18, 2**20, 2**22, 2**24)
REDUCED = (8, 2**10, 2**14, 2**17, 2**20, 2**22, 2**24)
COPIED = (2**10, 2**14, 2**18, 2**20, 2**22, 2**24, 2**26)
"""Bytes at which messages, reductions and copies are measured."""

_GATHERED = 2**17
"""Bytes up to which all-gathers are measured: statistics, and no activations."""

_BUSY = 1e-3
"""Seconds of a message of 8 bytes within a node from which on others must be using its cores."""

Progress = Callable[[str], object]


def calibrate(
    name: str | None = None,
    *,
    seconds: float = 40.0,
    memory: int | None = None,
    progress: Progress = lambda what: None,
) -> Machine:
    """Return the machine on which this runs, measured; all ranks of the job call it.

    Start as many ranks as a job has on a node, on two nodes or more where there are several, with
    the threads and the allocator settings of the job. One rank alone measures no messages.

    Parameters
    ----------
    name: of the machine; that of the host when not given.
    seconds: about how long the measurement takes.
    memory: bytes that a rank may use; the node's memory over its ranks when not given.
    progress: is called with the name of each part before it is measured.
    """
    comm = world()
    hosts = comm.allgather(platform.node())
    per_node = max(hosts.count(host) for host in set(hosts))
    sources = {}
    links: dict[str, LinkTimes] = {}
    reductions: dict[str, dict[int, LinkTimes]] = {}
    when = time.strftime("%Y-%m-%d")
    where_from = f"measured on {hosts[0]}, {when}, {comm.size} ranks on {len(set(hosts))} nodes"
    if comm.size > 1:
        for where, grid, peer in _pairs(hosts):
            progress(f"messages {where} nodes" if where == "between" else "messages within a node")
            links[where] = _messages(grid, peer, seconds / 4)
            sources[f"links {where}"] = f"{where_from}: pairs of ranks, all at once"
        for kind, sizes in (("all_reduce", REDUCED), ("all_gather", MESSAGES)):
            for ranks, grid in _groups(comm.size):
                progress(f"{kind} of {ranks} ranks")
                where = _where(hosts, ranks)
                chosen = [s for s in sizes if kind == "all_reduce" or s <= _GATHERED]
                link = _collective(kind, grid, chosen, seconds / 40)
                reductions.setdefault(f"{kind} {where}", {})[ranks] = link
                sources[f"{kind} {where}"] = f"{where_from}: groups of neighbours, all at once"
    if "within" in links and (least := links["within"].total.at(8)) > _BUSY and comm.rank == 0:
        warnings.warn(
            f"8 bytes take {least * 1e3:.1f} ms from rank to rank within a node, which takes a "
            "hundredth of that where nothing else runs and every rank has a core of its own; "
            "predictions for this machine will be wrong. Measure when it is free",
            stacklevel=2,
        )
    progress("the slowest rank")
    skew = _skew(seconds / 10)
    sources["skew"] = f"{where_from}: all ranks of the job at once"
    progress("copies and packing")
    copy = _table(_copies(rows=False), COPIED)
    packing = _table(_copies(rows=True), COPIED)
    sources["copy"] = sources["packing"] = f"{where_from}: all ranks at once, {torch.__version__}"
    progress("Python")
    host = measure_host_work(2 if seconds < 20 else 16)
    sources["host"] = (
        f"{where_from}: functions on tiny tensors, minus their local operators, all ranks at once, "
        "after bytes have gone through the caches"
    )
    sources["operators"] = f"timed on {hosts[0]} when first asked for"
    return Machine(
        name=name or hosts[0],
        assumed=False,
        ranks_per_node=per_node,
        threads=torch.get_num_threads(),
        links=links,
        reductions=reductions,
        copy=copy,
        packing=packing,
        host=host,
        skew=skew,
        memory=memory or _memory_of_node() // per_node,
        environment=allocator_here(),
        sources=sources,
    )


def _pairs(hosts: Sequence[str]) -> Iterator[tuple[str, ProcessGrid, int | None]]:
    """Yield `within` and `between` with a grid of all ranks and the partner of this one, if any."""
    grid = ProcessGrid(width=-1, device="cpu")
    me, ranks = grid.rank, range(len(hosts))
    neighbour = me ^ 1
    here = neighbour in ranks and hosts[neighbour] == hosts[me]
    if any(r ^ 1 in ranks and hosts[r ^ 1] == hosts[r] for r in ranks):
        yield "within", grid, neighbour if here else None
    nodes = list(dict.fromkeys(hosts))
    if len(nodes) > 1:
        number = nodes.index(hosts[me])
        place = [r for r in ranks if hosts[r] == hosts[me]].index(me)
        partner = None
        if number ^ 1 < len(nodes):
            theirs = [r for r in ranks if hosts[r] == nodes[number ^ 1]]
            partner = theirs[place] if place < len(theirs) else None
        yield "between", grid, partner


def _groups(ranks: int) -> Iterator[tuple[int, ProcessGrid]]:
    """Yield numbers of ranks, and grids whose axis `width` has as many neighbours."""
    sizes = [n for n in (2**i for i in range(1, 13)) if n < ranks and ranks % n == 0]
    for n in (*sizes, ranks):
        yield n, ProcessGrid(sample=ranks // n, width=n, device="cpu")


def _where(hosts: Sequence[str], ranks: int) -> str:
    groups = (set(hosts[i : i + ranks]) for i in range(0, len(hosts), ranks))
    return "between" if any(len(group) > 1 for group in groups) else "within"


def _messages(grid: ProcessGrid, peer: int | None, seconds: float) -> LinkTimes:
    rows = []
    for size in MESSAGES:
        leaving = torch.zeros(size, dtype=torch.uint8)
        arriving = torch.zeros(size, dtype=torch.uint8)
        into = [] if peer is None else [(peer, arriving)]
        out = [] if peer is None else [(peer, leaving)]

        def start(into: Any = into, out: Any = out) -> Any:
            return grid.transport.exchange(into, out, grid.transport.next_tag())

        late = peer is not None and peer < grid.rank
        rows.append(_under_way(grid, start, leaving, late, seconds / len(MESSAGES)))
    return _link(MESSAGES, rows)


def _collective(kind: str, grid: ProcessGrid, sizes: Sequence[int], seconds: float) -> LinkTimes:
    group = grid.communicator(("width",))
    rows = []
    for size in sizes:
        mine = torch.zeros(size // 4)

        def start(mine: Tensor = mine) -> Any:
            if kind == "all_reduce":
                return grid.transport.all_reduce(mine, group)
            grid.transport.all_gather(mine, group)
            return _Over()

        rows.append(_under_way(grid, start, mine, grid.rank % 2 == 1, seconds / len(sizes)))
    if kind == "all_gather":
        # It returns when it is complete, so nothing of it is left to wait for.
        rows = [(total, 0.0, 0.0, False) for total, *_ in rows]
    return _link(sizes, rows)


class _Over:
    """A movement that is complete when it has been started."""

    def wait(self) -> None:
        """Return at once."""


def _under_way(
    grid: ProcessGrid, start: Callable[[], Any], written: Tensor, late: bool, seconds: float
) -> tuple[float, float, float, bool]:
    """Return medians over rounds of the slowest rank: total, starting, and waiting after work; and
    whether those that wait at once wait for those that work.

    Parameters
    ----------
    written: is written before each start, as halos are packed and gradients made.
    late: whether this rank works when half of the ranks do.
    """
    clock = time.perf_counter
    comm = grid.comm
    for _ in range(3):
        start().wait()
    begun = clock()
    start().wait()
    once = max(comm.allgather(clock() - begun))
    rounds = max(5, min(50, int(seconds / 4 / max(once, 1e-5))))
    busy = 2 * once + 2e-4

    def go_through(i: int, working: bool) -> tuple[float, float, float]:
        """Return the seconds of starting, of waiting at the end, and of all, with work between."""
        written.fill_(i % 3)
        _meet(grid)
        begun = clock()
        request = start()
        started = clock()
        while working and clock() < started + busy:
            pass
        behind = clock()
        request.wait()
        ended = clock()
        return started - begun, ended - behind, ended - begun

    rows = []
    for i in range(rounds):
        posted, _, total = go_through(i, working=False)
        _, after, _ = go_through(i, working=True)
        *_, held = go_through(i, working=late)
        rows.append((total, posted, after, 0.0 if late else held))
    columns = [median(column) for column in zip(*rows, strict=True)]
    everyone = comm.allgather(columns)
    total, posted, after, held = (max(column) for column in zip(*everyone, strict=True))
    return total, min(posted, total), min(after, total), held > busy


def _meet(grid: ProcessGrid) -> None:
    """Wait for all ranks."""
    grid.transport.all_reduce(torch.zeros(1), grid.communicator(tuple(grid.shape))).wait()


def _link(sizes: Sequence[int], rows: Sequence[tuple[float, float, float, bool]]) -> LinkTimes:
    total, posted, after, both = zip(*rows, strict=True)
    eager = max((0, *sizes[: both.index(True)])) if any(both) else None
    return LinkTimes(_table(total, sizes), _table(posted, sizes), _table(after, sizes), eager)


def _skew(seconds: float) -> Table:
    """Return by how much the slowest rank takes longer than the mean for the same work, which is
    convolutions and passes over memory, against what the mean takes.

    Which rank is the slowest differs from work to work, with where its memory lies, so that each
    round takes other memory.
    """
    weight = torch.rand(16, 16, 3, 3)
    places = random.Random()  # others on each rank, whatever the program has seeded
    comm = world()
    clock = time.perf_counter
    points = [(0.0, 0.0)]
    for repeats in (1, 4, 16, 64):
        means: list[float] = []
        later: list[float] = []
        start = clock()
        while len(later) < 5 or max(comm.allgather(clock() - start)) < seconds / 4:
            before = torch.empty(places.randrange(2**18))
            x, memory = torch.rand(1, 16, 64, 64), torch.zeros(2**20)
            del before
            torch.conv2d(x, weight, padding=1)
            comm.allgather(None)
            begun = clock()
            for _ in range(repeats):
                torch.conv2d(x, weight, padding=1)
                memory.add_(1)
            times = comm.allgather(clock() - begun)
            means.append(mean(times))
            later.append(max(times) - means[-1])
        points.append((median(means), mean(later)))
    return Table(*zip(*sorted(points), strict=True))


def _table(seconds: Iterable[float], sizes: Sequence[int]) -> Table:
    return Table(tuple(map(float, sizes)), tuple(seconds))


def _copies(*, rows: bool) -> Iterator[float]:
    """Yield the seconds of copying each number of bytes: all in a row, or in rows of 64."""
    clock = time.perf_counter
    for size in COPIED:
        target = torch.ones(size // 4)
        source = torch.ones(size // 4)
        if rows:
            source = torch.ones(size // 64, 64)[:, :16]
            target = target.view(-1, 16)
        times = []
        for _ in range(max(3, min(100, 2**27 // size))):
            begun = clock()
            target.copy_(source)
            times.append(clock() - begun)
        yield max(world().allgather(median(times)))


def _memory_of_node() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
