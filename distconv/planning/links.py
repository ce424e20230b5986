"""Bytes between ranks in seconds, from the tables of a machine.

Collectives of more ranks than were measured, or of described machines, follow the costs of Thakur,
Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import NamedTuple

from distconv.planning.machine import Link, Machine


class Cost(NamedTuple):
    """Seconds of a movement."""

    total: float
    """From the start to the end where the ranks do nothing else."""
    posted: float
    """Of that, what the call that starts it takes."""
    after: float
    """What the wait takes at least, however late it comes."""
    both: bool = False
    """Whether the messages wait for those ranks, too, to which they go."""


def check_ranks(machine: Machine, ranks: int) -> None:
    """Complain where a machine has no times for a grid of so many ranks.

    Raises
    ------
    ValueError
        For more ranks than a node has, on a machine without times between nodes.
    """
    if ranks > machine.ranks_per_node:
        _link_of(machine, "between")


def messages_cost(
    rank: int,
    arriving: Sequence[tuple[int, int]],
    leaving: Sequence[tuple[int, int]],
    machine: Machine,
) -> Cost:
    """Return the cost of an exchange: (rank, bytes) of each message that arrives or leaves.

    As in the LogGP model of Alexandrov et al., "LogGP: Incorporating Long Messages into the LogP
    Model" (SPAA 1995): the latencies of a rank's messages pass at the same time. One after the
    other are only what its host does for each message, which is what starting and completing an
    empty one takes, and the bytes over links of one kind. Both kinds work at the same time.
    """
    posted = after = host = 0.0
    both, rest = False, []
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
    return Cost(max(host + max(rest, default=0.0), posted), posted, after, both)


def _link_of(machine: Machine, where: str) -> Link:
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
    """Return the cost of a collective among `ranks`, each of which contributes `size` bytes.

    Parameters
    ----------
    kind: `all_reduce` or `all_gather`.
    """
    where, count = machine.where(ranks), len(ranks)
    measured = machine.reductions.get(f"{kind} {where}", {})
    if count in measured:
        link = measured[count]
        both = link.waits_for_both(size)
        return Cost(link.total.at(size), link.posted.at(size), link.after.at(size), both)
    if measured:
        nearest = min(measured, key=lambda n: abs(log2(n) - log2(count)))
        link = measured[nearest]
        latency = link.total.at(0)
        steps = log2(count) / log2(nearest)
        share = _share(kind, count) / _share(kind, nearest)
        total = latency * steps + (link.total.at(size) - latency) * share
        both = link.waits_for_both(size)
        return Cost(total, link.posted.at(size), link.after.at(size) * share, both)
    nodes = {machine.node(rank) for rank in ranks}
    total = 0.0
    inside = -(-count // len(nodes))
    posted, after, both = 0.0, 0.0, False
    for level, many in (("within", inside), ("between", len(nodes))):
        if many > 1:
            link = _link_of(machine, level)
            latency = link.total.at(0)
            if kind == "all_reduce":
                # Inside a node first; between nodes each rank then carries its share of the bytes.
                part, passes = size / inside if level == "between" else size, 2
            else:
                # Between nodes first; inside, each rank then passes on what has come from all.
                part, passes = size * len(nodes) if level == "within" else size, 1
            total += passes * log2(many) * latency
            total += _share(kind, many) * (link.total.at(part) - latency)
            posted, after = max(posted, link.posted.at(part)), max(after, link.after.at(part))
            both = both or link.waits_for_both(part)
    return Cost(total, posted, after, both)


def _share(kind: str, ranks: int) -> float:
    """Return how many times its contribution a rank sends: by Rabenseifner's sum, or a ring."""
    return 2 * (ranks - 1) / ranks if kind == "all_reduce" else ranks - 1
