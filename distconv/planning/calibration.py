"""`calibrate`: time a machine's messages, collectives, copies and Python in under a minute.

All ranks take part and load the machine as a job does: all pairs send messages at the same time,
and all ranks of a node copy memory at once.
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
from distconv.grid.ranks import world
from distconv.planning.host_work import measure_host_work
from distconv.planning.machine import LinkTimes, Machine, Table, allocator_here

MESSAGES = (8, 2**10, 2**13, 2**15, 2**16, 2**18, 2**20, 2**22, 2**24)
GATHERED = (8, 2**10, 2**13, 2**15, 2**16)
"""Sizes in bytes at which all-gathers are timed; small, as all-gathers carry statistics."""
REDUCED = (8, 2**10, 2**14, 2**17, 2**20, 2**22, 2**24)
PACKED = (2**10, 2**14, 2**18, 2**20, 2**22, 2**24, 2**26)
"""Sizes in bytes at which copies are timed. `MESSAGES` are the sizes of messages, `REDUCED` the
sizes of all-reduces."""

_BUSY = 1e-3
"""Seconds of an 8-byte message within a node above which `calibrate` warns that the node is
busy."""

Progress = Callable[[str], object]


def calibrate(
    name: str | None = None,
    *,
    seconds: float = 40.0,
    memory: int | None = None,
    progress: Progress = lambda what: None,
) -> Machine:
    """Measure this machine, and return a model of it. Collective.

    Start the number of ranks that a job has on a node, on two nodes or more if there are several,
    with the threads and the allocator settings of the job. With a single rank, no messages are
    timed.

    Parameters
    ----------
    name: the name of the machine; the host's name when not given.
    seconds: the approximate duration of the measurement. Functions whose Python has not been timed
        by then get the median time of the others.
    memory: bytes that a rank may use; by default the node's memory divided by its ranks.
    progress: called with the name of each part of the measurement before it starts.

    Examples
    --------
    >>> machine = dc.planning.calibrate("cluster")  # doctest: +SKIP
    >>> machine.save("machine.json")  # doctest: +SKIP
    """
    hosts = world().allgather(platform.node())
    links: dict[str, LinkTimes] = {}
    reductions: dict[str, dict[int, LinkTimes]] = {}
    if len(hosts) > 1:
        links = _links(hosts, seconds / 4, progress)
        reductions = _reductions(hosts, seconds / 40, progress)
    progress("the slowest rank")
    skew = _skew(seconds / 10)
    progress("packing")
    packing = _table(_packing(), PACKED)
    progress("Python")
    host = measure_host_work(0.6 * seconds)
    per_node = max(map(hosts.count, hosts))
    memory_of_node = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        name=name or hosts[0],
        assumed=False,
        ranks_per_node=per_node,
        threads=torch.get_num_threads(),
        links=links,
        reductions=reductions,
        packing=packing,
        host=host,
        skew=skew,
        memory=memory or memory_of_node // per_node,
        environment=allocator_here(),
        sources=_sources(hosts, (*(f"links {where}" for where in links), *reductions)),
    )


def _sources(hosts: Sequence[str], messages: Iterable[str]) -> dict[str, str]:
    """Return the origin of the numbers of each part of the model: host, date, ranks, torch.

    `hosts` has the host name of each rank; `messages` are the names of parts of message times.
    """
    how = (
        f"measured on {hosts[0]}, {time.strftime('%Y-%m-%d')}, {len(hosts)} ranks on "
        f"{len(set(hosts))} nodes at once, torch {torch.__version__}"
    )
    timed = {"operators": f"timed on {hosts[0]} when first asked for"}
    return dict.fromkeys((*messages, "packing", "skew", "host"), how) | timed


def _links(hosts: Sequence[str], seconds: float, progress: Progress) -> dict[str, LinkTimes]:
    """Return the times of messages "within" a node and "between" nodes; warn if the node is busy.

    `hosts` has the host name of each rank, and `seconds` is the duration for each kind. Collective.
    """
    links = {}
    for where, grid, peer in _pairs(hosts):
        progress(f"messages {where} nodes" if where == "between" else "messages within a node")
        links[where] = _messages(grid, peer, seconds)
    if "within" in links and (least := links["within"].total.at(8)) > _BUSY and world().rank == 0:
        warnings.warn(
            f"8 bytes take {least * 1e3:.1f} ms from rank to rank within a node, a hundred times "
            "as long as on an idle node with a core for every rank; predictions for this machine "
            "will be wrong. Measure again when the node is idle",
            stacklevel=3,
        )
    return links


def _reductions(
    hosts: Sequence[str], seconds: float, progress: Progress
) -> dict[str, dict[int, LinkTimes]]:
    """Return the times of collectives, by name such as "all_reduce within" and by number of ranks.

    `hosts` has the host name of each rank, and `seconds` is the duration for each entry.
    Collective.
    """
    found: dict[str, dict[int, LinkTimes]] = {}
    for kind, sizes in (("all_reduce", REDUCED), ("all_gather", GATHERED)):
        for ranks, grid in _groups(len(hosts)):
            progress(f"{kind} of {ranks} ranks")
            of_kind = found.setdefault(f"{kind} {_where(hosts, ranks)}", {})
            of_kind[ranks] = _collective(kind, grid, sizes, seconds)
    return found


def _pairs(hosts: Sequence[str]) -> Iterator[tuple[str, ProcessGrid, int | None]]:
    """Yield "within" and "between" (nodes), each with a grid of all ranks and the rank to send to.

    The rank to send to is None where this rank has no partner. Collective.
    """
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
    """Yield each number of ranks whose collectives are timed, with a grid of that width."""
    sizes = [n for n in (2**i for i in range(1, 13)) if n < ranks and ranks % n == 0]
    for n in (*sizes, ranks):
        yield n, ProcessGrid(sample=ranks // n, width=n, device="cpu")


def _where(hosts: Sequence[str], ranks: int) -> str:
    groups = (set(hosts[i : i + ranks]) for i in range(0, len(hosts), ranks))
    return "between" if any(len(group) > 1 for group in groups) else "within"


def _messages(grid: ProcessGrid, peer: int | None, seconds: float) -> LinkTimes:
    def starter(size: int) -> tuple[Callable[[], Any], Tensor]:
        leaving, arriving = torch.zeros(2, size, dtype=torch.uint8)
        into = [] if peer is None else [(peer, arriving)]
        out = [] if peer is None else [(peer, leaving)]
        return lambda: grid.transport.exchange(into, out, grid.transport.next_tag()), leaving

    late = peer is not None and peer < grid.rank
    return _link(grid, MESSAGES, starter, late, seconds)


def _collective(kind: str, grid: ProcessGrid, sizes: Sequence[int], seconds: float) -> LinkTimes:
    group = grid.communicator(("width",))

    def starter(size: int) -> tuple[Callable[[], Any], Tensor]:
        mine = torch.zeros(size // 4)
        return lambda: getattr(grid.transport, kind)(mine, group), mine

    link = _link(grid, sizes, starter, grid.rank % 2 == 1, seconds)
    if kind == "all_reduce":
        return link
    # An all-gather is complete when it returns, so a wait takes no time.
    nothing = _table([0.0] * len(sizes), sizes)
    return LinkTimes(link.total, nothing, nothing)


def _link(
    grid: ProcessGrid,
    sizes: Sequence[int],
    starter: Callable[[int], tuple[Callable[[], Any], Tensor]],
    late: bool,
    seconds: float,
) -> LinkTimes:
    """Return the times of messages, or of a collective, at each of `sizes` in bytes. Collective.

    Parameters
    ----------
    starter: takes a number of bytes, and returns a function that starts the messages or the
        collective, and the tensor that it sends.
    late: whether this rank computes between start and wait, to find whether data arrives during
        computation; True on one rank of each pair.
    seconds: the approximate duration of the measurement.
    """
    rows = [_time_messages(grid, *starter(size), late, seconds / len(sizes)) for size in sizes]
    total, posted, after, both = zip(*rows, strict=True)
    eager = max((0, *sizes[: both.index(True)])) if any(both) else None
    return LinkTimes(_table(total, sizes), _table(posted, sizes), _table(after, sizes), eager)


def _time_messages(
    grid: ProcessGrid, start: Callable[[], Any], written: Tensor, late: bool, seconds: float
) -> tuple[float, float, float, bool]:
    """Time the messages, or the collective, that `start` starts. Collective.

    Returns the seconds of the slowest rank from start to completion, for the call `start`, and for
    a wait that follows computation; and whether data is sent only while both ranks wait. To find
    the latter, a `late` rank computes between start and wait, while its partner waits at once.

    Parameters
    ----------
    written: the tensor that is sent. Each round writes to it before the start.
    seconds: the approximate duration of the measurement.
    """
    clock = time.perf_counter
    comm = grid.comm
    for _ in range(3):
        _wait_for(start())
    begun = clock()
    _wait_for(start())
    once = max(comm.allgather(clock() - begun))
    rounds = max(5, min(50, int(seconds / 4 / max(once, 1e-5))))
    busy = 2 * once + 2e-4

    def go_through(i: int, working: bool) -> tuple[float, float, float]:
        """Return the seconds of start, wait and both in round `i`; compute between if `working`."""
        written.fill_(i % 3)
        _meet(grid)
        begun = clock()
        request = start()
        started = clock()
        while working and clock() < started + busy:
            pass
        behind = clock()
        _wait_for(request)
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


def _wait_for(request: Any) -> None:
    if not isinstance(request, Tensor):  # an all-gather is complete
        request.wait()


def _meet(grid: ProcessGrid) -> None:
    """Wait for all ranks of the grid by an all-reduce, as a barrier does. Collective."""
    grid.transport.all_reduce(torch.zeros(1), grid.communicator(tuple(grid.shape))).wait()


def _skew(seconds: float) -> Table:
    """Return by how many seconds the slowest rank exceeds the mean of all ranks in equal work.

    The result is a table of the extra seconds by the mean seconds. The work is convolutions and
    passes over memory. Which rank is slowest depends on where its memory lies, so each round
    allocates other memory. Collective.
    """
    weight = torch.rand(16, 16, 3, 3)
    places = random.Random()  # different on each rank, whatever the program's seed
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


def _packing() -> Iterator[float]:
    """Yield the seconds to copy each size in `PACKED` bytes, in rows of 64 bytes. Collective."""
    clock = time.perf_counter
    for size in PACKED:
        target, source = torch.ones(size // 64, 16), torch.ones(size // 64, 64)[:, :16]
        times = []
        for _ in range(max(3, min(100, 2**27 // size))):
            begun = clock()
            target.copy_(source)
            times.append(clock() - begun)
        yield max(world().allgather(median(times)))
