"""The seconds of messages and collectives, from the tables of a machine.

Collectives of more ranks than were measured, or of described machines, follow the costs of Thakur,
Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import NamedTuple

from distconv.planning.machine import LinkTimes, Machine


class Cost(NamedTuple):
    """The seconds that an exchange of messages, or a collective, takes for one rank."""

    total: float
    """Seconds from start to end where the ranks do nothing else."""
    posted: float
    """Seconds of the call that starts it, a part of `total`."""
    after: float
    """The shortest wait, however late it begins."""
    both: bool = False
    """Whether messages move only while their receiving ranks wait as well."""


def check_ranks(machine: Machine, ranks: int) -> None:
    """Raise `ValueError` if ranks need several nodes, and `machine` has no times between nodes."""
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
    (starting and completing an empty one) adds up, and so do the bytes over links of one kind.
    Links within and between nodes work at the same time.

    `arriving` and `leaving` hold the other rank and the bytes of each message.
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
            f"{machine.name} has no times between nodes, and the grid has more ranks than the "
            f"{machine.ranks_per_node} of a node; calibrate with all ranks of a node, and on two "
            "nodes where there are several, or describe them"
        )
    return next(iter(links.values()))


def collective_cost(kind: str, ranks: Sequence[int], size: int, machine: Machine) -> Cost:
    """Return the cost of an `all_reduce` or `all_gather` on `machine`, in seconds.

    `kind` is one of these names, `ranks` the ranks that take part, and `size` the bytes that each
    of them contributes.
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
