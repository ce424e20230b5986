"""The recordings of some ranks put into time: who computes, and who waits for whom.

Local operators, Python and messages follow one another as the code has them. A rank that waits goes
on when its messages are there, for which the other ranks have to have sent them; ranks that are not
played do as the waiting rank itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from distconv.planning.links import Cost, collective_cost, messages_cost
from distconv.planning.machine import Machine
from distconv.planning.operators import OperatorTimes
from distconv.planning.recording import Compute, HostWork, Place, Recording, Start, Wait


class Segment(NamedTuple):
    """A stretch of a rank's time."""

    rank: int
    start: float
    stop: float
    what: str
    """`compute`, `host`, `communication` or `wait`."""
    place: Place
    follows: tuple[int, float] | None = None
    """The rank and moment that a wait has waited for, where that is another rank."""


class Passage(NamedTuple):
    """A movement that was under way between ranks, as one of them has seen it."""

    place: Place
    """Where it was started."""
    seconds: float
    exposed: float
    """Seconds in which the rank did nothing else."""


class _Rank:
    """A rank on its way through its recording."""

    def __init__(self, recording: Recording):
        self.recording = recording
        self.segments: list[Segment] = []
        self.passages: list[Passage] = []
        self.now = 0.0
        """The moment at which the device is free; on CPUs the host is the device."""
        self.host = 0.0
        self.next = 0
        self.started: dict[int, tuple[float, Cost, Start, float]] = {}

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


class Timeline(NamedTuple):
    """The step of all ranks that were played."""

    seconds: float
    slowest: int
    segments: Mapping[int, Sequence[Segment]]
    passages: Mapping[int, Sequence[Passage]]

    def critical_path(self) -> list[Segment]:
        """Return the stretches that end with the step, each of which the next has waited for."""
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
            # Another rank has sent late; from there on the messages themselves take their time.
            rank, moment = segment.follows
            if segment.what == "communication":
                path.append(segment._replace(start=moment))
        return path[::-1]


def play(recordings: Sequence[Recording], machine: Machine, times: OperatorTimes) -> Timeline:
    """Return the step of ranks of one grid, whose local operators have been prepared."""
    ranks = {r.rank: _Rank(r) for r in recordings}
    moving = True
    while moving:
        moving = False
        for rank in ranks.values():
            while _advance(rank, ranks, machine, times):
                moving = True
    stuck = [r for r, rank in ranks.items() if rank.next < len(rank.recording.events)]
    if stuck:
        raise RuntimeError(f"ranks {stuck} wait for messages that nobody sends; this is a mistake")
    ends = {r: max(rank.now, rank.host) for r, rank in ranks.items()}
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
    """Take a rank through its next event; return False where it has to wait, or is at its end."""
    events = rank.recording.events
    if rank.next == len(events):
        return False
    event = events[rank.next]
    if isinstance(event, Compute):
        seconds = times[event.operator]
        if machine.asynchronous:
            rank.host += machine.host.get("launch", 0.0)
            rank.now = max(rank.now, rank.host)
        rank.add(rank.now, rank.now + seconds, "compute", event.place)
        rank.now += seconds
    elif isinstance(event, HostWork):
        seconds = host_seconds(event.function, machine)
        if machine.asynchronous:
            rank.host += seconds
        else:
            rank.add(rank.now, rank.now + seconds, "host", event.place)
            rank.now += seconds
    elif isinstance(event, Start):
        _start(rank, event, machine)
    elif not _finish(rank, event, ranks, machine):
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
    begun = rank.now
    if machine.asynchronous:
        rank.host += cost.posted
        begun = rank.now = max(rank.now, rank.host)
    else:
        rank.add(rank.now, rank.now + cost.posted, "communication", event.place)
        rank.now += cost.posted
    rank.started[event.number] = begun, cost, event, rank.now


def _finish(rank: _Rank, event: Wait, ranks: Mapping[int, _Rank], machine: Machine) -> bool:
    begun, cost, start, _ = rank.started[event.number]
    latest, cause = begun, None
    for peer, _ in start.arriving:
        other = ranks.get(peer)
        if other is None:
            continue
        if event.number not in other.started:
            return False
        if other.started[event.number][0] > latest:
            latest, cause = other.started[event.number][0], peer
    arrived = latest + cost.total
    stop = max(rank.now + cost.after, arrived)
    waited = stop - rank.now
    follows = (cause, latest) if cause is not None and arrived >= rank.now + cost.after else None
    # What the messages themselves take comes after what another rank lets wait.
    own = min(waited, cost.total)
    rank.add(rank.now, stop - own, "wait", event.place, follows)
    rank.add(stop - own, stop, "communication", event.place, follows if own == waited else None)
    rank.now = stop
    exposed = waited + (0.0 if machine.asynchronous else cost.posted)
    rank.passages.append(Passage(start.place, cost.total, exposed))
    return True


def host_seconds(function: str, machine: Machine) -> float:
    """Return the seconds of Python of a function on distributed tensors."""
    host = machine.host
    if function in host:
        return host[function]
    across = " across ranks" if " across ranks" in function else ""
    back = " backward" if function.endswith(" backward") else ""
    return host.get(f"*{across}{back}", host.get("*", 0.0))
