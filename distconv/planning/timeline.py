"""`play`: simulate a recorded step in time, on ranks that compute and wait for each other.

Local operators, Python and messages follow one another in the order of the code. A waiting rank
continues when its messages have arrived: the other ranks must have sent them and, if messages are
sent only while both sides wait, must wait as well. Ranks that are not simulated are assumed to
behave as the waiting rank. Ranks with equal work take different times, so a wait is for the slowest
of them; the extra time (`Machine.skew`) depends on the time since the rank last waited.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from typing import NamedTuple

from distconv.planning.machine import LinkTimes, Machine, kind_of_function
from distconv.planning.operators import OperatorTimes
from distconv.planning.recording import Completion, Compute, HostWork, Place, Recording, Start

# The seconds of messages and collectives, from the tables of a machine.
#
# Collectives of more ranks than were measured, or of described machines, follow the costs of
# Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH"
# (2005).


class Cost(NamedTuple):
    """The seconds that an exchange of messages, or a collective, takes for one rank."""

    total: float
    """Seconds from start to completion if the ranks do nothing else."""
    posted: float
    """Seconds of the call that starts the messages or the collective, a part of `total`."""
    after: float
    """Seconds of the shortest wait, however late the wait begins."""
    both: bool = False
    """Whether messages are sent only while their receiving ranks wait as well."""


def check_ranks(machine: Machine, ranks: int) -> None:
    """Raise ValueError if `ranks` need several nodes and `machine` lacks times between nodes."""
    if ranks > machine.ranks_per_node:
        _link_of(machine, "between")


def messages_cost(
    rank: int,
    arriving: Sequence[tuple[int, int]],
    leaving: Sequence[tuple[int, int]],
    machine: Machine,
) -> Cost:
    """Return the cost of an exchange of messages for `rank`, in seconds.

    After the LogGP model of Alexandrov et al., "LogGP: Incorporating Long Messages into the LogP
    Model" (SPAA 1995): the latencies of a rank's messages overlap. The host's work for messages
    (starting and completing an empty one) is summed, and so are the bytes over links of one kind.
    Links within and between nodes work at the same time.

    `arriving` and `leaving` have the other rank and the bytes of each message.
    """
    posted = after = host = 0.0
    both, rest = False, [0.0]
    for where in ("within", "between"):
        sides = [
            [size for peer, size in side if machine.where((rank, peer)) == where]
            for side in (arriving, leaving)
        ]
        count, size = max(map(len, sides)), max(map(sum, sides))
        if not count:
            continue
        link = _link_of(machine, where)
        each = min(link.posted.at(0) + link.after.at(0), link.total.at(0))
        host += count * each
        rest.append(link.total.at(size) - each)
        posted += link.posted.at(size / count) * count
        after += link.after.at(size) + (count - 1) * link.after.at(0)
        both = both or link.waits_for_both(max(map(max, filter(None, sides))))
    return Cost(max(host + max(rest), posted), posted, after, both)


def _link_of(machine: Machine, where: str) -> LinkTimes:
    links = machine.links
    if where in links:
        return links[where]
    if where == "between":
        raise ValueError(
            f"{machine.name} has no message times between nodes, but the grid has more ranks than "
            f"the {machine.ranks_per_node} of a node; calibrate with all ranks of a node, and on "
            "two nodes if the cluster has several, or describe these times in the machine file"
        )
    return next(iter(links.values()))


def collective_cost(kind: str, ranks: Sequence[int], size: int, machine: Machine) -> Cost:
    """Return the cost of an `all_reduce` or `all_gather` on `machine`, in seconds.

    `kind` is one of these names, `ranks` are the ranks that take part, and `size` is the bytes that
    each rank contributes.
    """
    where, count = machine.where(ranks), len(ranks)
    measured = machine.reductions.get(f"{kind} {where}", {})
    if measured:
        nearest = min(measured, key=lambda n: abs(log2(n) - log2(count)))
        link, both = measured[nearest], measured[nearest].waits_for_both(size)
        steps = log2(count) / log2(nearest)
        share = _share(kind, count) / _share(kind, nearest)
        latency = link.total.at(0)
        total = latency * steps + (link.total.at(size) - latency) * share
        return Cost(total, link.posted.at(size), link.after.at(size) * share, both)
    nodes = len({machine.node(rank) for rank in ranks})
    inside = -(-count // nodes)
    total = posted = after = 0.0
    both = False
    for level, many in (("within", inside), ("between", nodes)):
        if many > 1:
            link = _link_of(machine, level)
            latency = link.total.at(0)
            if kind == "all_reduce":
                # Within a node first; between nodes each rank then carries its share of the bytes.
                part, passes = size / inside if level == "between" else size, 2
            else:
                # Between nodes first; within a node each rank then passes on the bytes of all
                # nodes.
                part, passes = size * nodes if level == "within" else size, 1
            total += passes * log2(many) * latency
            total += _share(kind, many) * (link.total.at(part) - latency)
            posted, after = max(posted, link.posted.at(part)), max(after, link.after.at(part))
            both = both or link.waits_for_both(part)
    return Cost(total, posted, after, both)


def _share(kind: str, ranks: int) -> float:
    """Return the bytes that a rank sends in a collective for each byte that it contributes.

    `kind` is "all_reduce", which follows Rabenseifner's algorithm, or "all_gather", which follows a
    ring.
    """
    return 2 * (ranks - 1) / ranks if kind == "all_reduce" else ranks - 1


class Segment(NamedTuple):
    """An interval of a simulated rank's time with one activity, such as a wait."""

    rank: int
    start: float
    stop: float
    what: str
    """`compute`, `host`, `communication` or `wait`."""
    place: Place
    follows: tuple[int, float] | None = None
    """The rank that ended a wait, and the moment on its clock; None if no other rank was late."""


class Passage(NamedTuple):
    """The interval from the start of messages, or of a reduction, until a simulated rank waits.

    The rank does other work in this interval.
    """

    place: Place
    """The place of the step at which the messages were started."""
    start: float
    stop: float


@dataclass
class _InFlight:
    """Messages or a reduction that a simulated rank has started."""

    start: Start
    cost: Cost
    begun: float
    """The time when the slowest of the ranks with equal work has started the messages."""
    posted: float
    """The time when this rank continues with other work."""
    served: float | None = None
    """The time when the slowest of the ranks with equal work next waits for anything."""


class _Rank:
    """A simulated rank: the time on its clock, its next event, and its segments so far."""

    def __init__(self, recording: Recording):
        self.recording = recording
        self.segments: list[Segment] = []
        self.passages: list[Passage] = []
        self.now = 0.0
        """The time when the device is free; on CPUs the host is the device."""
        self.host = 0.0
        self.next = 0
        self.started: dict[int, _InFlight] = {}
        self.unserved: list[_InFlight] = []
        self.met = 0.0
        """The time when the rank last ended a wait."""

    def add(
        self,
        start: float,
        stop: float,
        what: str,
        place: Place,
        follows: tuple[int, float] | None = None,
    ) -> None:
        if stop > start:
            self.segments.append(Segment(self.recording.rank, start, stop, what, place, follows))

    def wait_for_host(self, place: Place) -> None:
        """Let the device wait until the time of the host, if later; record a segment "host"."""
        self.add(self.now, self.host, "host", place)
        self.now = max(self.now, self.host)

    def all_here(self, machine: Machine) -> float:
        """Return the time at which the slowest of the ranks with equal work reaches this point.

        It is the time on this rank's clock, plus the machine's skew for the time since this rank
        last waited.
        """
        return self.now + machine.skew.at(self.now - self.met)


class Timeline(NamedTuple):
    """A simulated step: its seconds, its slowest rank, and the activities of each simulated rank.

    `segments` has the intervals with one activity by rank, `passages` the intervals in which
    messages or reductions are in flight while the rank does other work.
    """

    seconds: float
    slowest: int
    segments: Mapping[int, Sequence[Segment]]
    passages: Mapping[int, Sequence[Passage]]

    def critical_path(self) -> list[Segment]:
        """Return the segments that determine the seconds of the step, in order, over all ranks.

        The path is followed back from the end of the step; a wait leads to the rank that was waited
        for.
        """
        path: list[Segment] = []
        rank, moment = self.slowest, self.seconds
        places = {r: len(s) for r, s in self.segments.items()}
        while places[rank]:
            segment = self.segments[rank][places[rank] - 1]
            places[rank] -= 1
            if segment.start >= moment:
                continue
            if segment.follows is None:
                path.append(segment)
                moment = segment.start
                continue
            # Another rank has sent late; from then on the messages take their own time.
            rank, moment = segment.follows
            if segment.what == "communication":
                path.append(segment._replace(start=moment))
        return path[::-1]


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals, in their unit."""
    length, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        length += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return length


def play(recordings: Sequence[Recording], machine: Machine, times: OperatorTimes) -> Timeline:
    """Simulate a step from recordings of some ranks of one grid; return its timeline.

    `machine` has the times of messages and of Python, `times` those of the local operators.
    """
    ranks = {r.rank: _Rank(r) for r in recordings}
    moving = True
    while moving:
        moving = False
        for rank in ranks.values():
            while _advance(rank, ranks, machine, times):
                moving = True
    stuck = [r for r, rank in ranks.items() if rank.next < len(rank.recording.events)]
    if stuck:
        raise RuntimeError(
            f"ranks {stuck} wait for messages that no rank sends: an error in distconv; please "
            "report it"
        )
    for rank in ranks.values():
        if rank.recording.events:
            rank.wait_for_host(rank.recording.events[-1].place)
    ends = {r: rank.now for r, rank in ranks.items()}
    slowest = max(ends, key=ends.__getitem__)
    return Timeline(
        ends[slowest],
        slowest,
        {r: rank.segments for r, rank in ranks.items()},
        {r: rank.passages for r, rank in ranks.items()},
    )


def _advance(
    rank: _Rank, ranks: Mapping[int, _Rank], machine: Machine, times: OperatorTimes
) -> bool:
    """Simulate a rank's next event; return False if the rank must wait, or has no more events."""
    events = rank.recording.events
    if rank.next == len(events):
        return False
    event = events[rank.next]
    if isinstance(event, Compute):
        seconds = times[event.operator]
        if machine.asynchronous:
            rank.host += machine.host["launch"].at(0) if "launch" in machine.host else 0.0
            rank.wait_for_host(event.place)
        rank.add(rank.now, rank.now + seconds, "compute", event.place)
        rank.now += seconds
    elif isinstance(event, HostWork):
        seconds = host_seconds(event, machine)
        if machine.asynchronous:
            rank.host += seconds
        else:
            rank.add(rank.now, rank.now + seconds, "host", event.place)
            rank.now += seconds
    elif isinstance(event, Start):
        _start(rank, event, machine)
    elif not _complete(rank, event, ranks, machine):
        return False
    rank.next += 1
    return True


def _start(rank: _Rank, event: Start, machine: Machine) -> None:
    me = rank.recording.rank
    if event.collective is None:
        cost = messages_cost(me, event.arriving, event.leaving, machine)
    else:
        peers = sorted((me, *(peer for peer, _ in event.arriving)))
        size = event.arriving[0][1] if event.arriving else 0
        cost = collective_cost(event.collective, peers, size, machine)
    if machine.asynchronous:
        rank.host += cost.posted
        rank.wait_for_host(event.place)
        begun = rank.now
    else:
        begun = rank.all_here(machine)
        rank.add(rank.now, rank.now + cost.posted, "communication", event.place)
        rank.now += cost.posted
    rank.started[event.number] = movement = _InFlight(event, cost, begun, rank.now)
    rank.unserved.append(movement)


def _complete(rank: _Rank, event: Completion, ranks: Mapping[int, _Rank], machine: Machine) -> bool:
    here = rank.all_here(machine)
    for movement in rank.unserved:
        movement.served = here
    rank.unserved.clear()
    me = rank.recording.rank
    mine = rank.started[event.number]
    cost = mine.cost
    begun, served = (mine.begun, me), (mine.served or here, me)
    for peer, _ in mine.start.arriving:
        if peer not in ranks:
            continue
        theirs = ranks[peer].started.get(event.number)
        if theirs is None or (cost.both and theirs.served is None):
            return False
        begun = max(begun, (theirs.begun, peer))
        if cost.both and theirs.served is not None:
            served = max(served, (theirs.served, peer))
    latest = (begun[0] + cost.total, *begun), (served[0] + cost.after, *served)
    stop, moment, cause = max(*latest, (rank.now, rank.now, me))
    waited = stop - rank.now
    follows = None if cause == me else (cause, moment)
    # The time of the messages themselves follows the wait for another rank.
    own = min(waited, cost.total)
    rank.add(rank.now, stop - own, "wait", event.place, follows)
    rank.add(stop - own, stop, "communication", event.place, follows if own == waited else None)
    rank.passages.append(Passage(mine.start.place, mine.posted, rank.now))
    rank.now = rank.met = stop
    return True


def host_seconds(work: HostWork, machine: Machine) -> float:
    """Return the seconds that Python takes for a function on DistTensors."""
    function = work.function
    assembled = function.replace(" overlapped", "")  # the only entry in files of earlier versions
    for name in (function, assembled, kind_of_function(function), "*"):
        if name in machine.host:
            return machine.host[name].at(work.streamed)
    return 0.0
