"""Messages on a fat tree, by SimGrid with all their contention, beside the planner's links.

    python -m benchmarks.trace trace.json ... --machine machines/lassen.json
    python -m benchmarks.contention machines/lassen.json trace.json [...] > contention.md

A trace has the messages of all ranks in a training step. Every different exchange and collective
in it is simulated with all ranks at once, and compared with what the planner takes for the slowest
rank. SimGrid is that of the system's Python (Debian: python3-simgrid); PYTHON_WITH_SIMGRID names
another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import log2
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from distconv.geometry.topology import Topology
from distconv.planning.links import collective_cost, messages_cost
from distconv.planning.machine import Machine
from distconv.planning.table import byte_size, markdown

Step: TypeAlias = list[tuple[int, int, float]]
"""Messages that start at the same time: from and to which rank, and their bytes."""

LEAF = 18
"""Nodes on a switch of 36 ports, which has as many links upwards."""


class Movement(NamedTuple):
    """One exchange or collective of a step, of all ranks."""

    name: str
    times: int
    """How often a step has it."""
    steps: list[Step]
    planned: float
    """Seconds that the planner takes for the slowest rank."""


class Trace:
    """The messages of a step, as `benchmarks.trace` writes them."""

    def __init__(self, given: Mapping[str, Any]):
        self.topology = Topology(tuple(given["extents"]))
        self.axes: list[str] = given["axes"]
        self.name: str = given["module"]
        self._kinds: list[int] = given["kind_of_rank"]
        self._events: list[list[list[Any]]] = given["events"]

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.topology.size

    def movements(self, machine: Machine) -> Iterator[Movement]:
        """Yield what is different among the exchanges and collectives of a step."""
        starts = [
            {event[1]: event for event in of_kind if event[0] not in ("compute", "wait")}
            for of_kind in self._events
        ]
        found: dict[str, list[int]] = {}
        for number in sorted(set().union(*starts)):
            alike = [of[number][:1] + of[number][2:] if number in of else None for of in starts]
            found.setdefault(json.dumps(alike), []).append(number)
        for numbers in found.values():
            events = [of.get(numbers[0]) for of in starts]
            kind = next(event[0] for event in events if event is not None)
            if kind == "exchange":
                yield self._exchange(events, len(numbers), machine)
            else:
                yield self._collective(events[0], len(numbers), machine)

    def _exchange(self, events: Sequence[Any], times: int, machine: Machine) -> Movement:
        step: Step = []
        slowest, most = 0.0, 0
        for rank, kind in enumerate(self._kinds):
            event = events[kind] or ("exchange", 0, (), ())
            arriving, leaving = (self._peers(rank, side) for side in event[2:])
            step += [(peer, rank, size) for peer, size in arriving]
            slowest = max(slowest, messages_cost(rank, arriving, leaving, machine).total)
            most = max(most, sum(size for _, size in arriving))
        return Movement(f"halos of up to {byte_size(most)} a rank", times, [step], slowest)

    def _peers(self, rank: int, side: Sequence[Any]) -> list[tuple[int, int]]:
        here = self.topology.coordinates(rank)
        return [
            (self.topology.rank({a: here[a] + o for a, o in zip(self.axes, by, strict=True)}), size)
            for by, size in side
        ]

    def _collective(self, event: Any, times: int, machine: Machine) -> Movement:
        kind, _, axes, size = event
        groups = [list(group) for group in self._groups(axes)]
        steps_of = all_reduce if kind == "all_reduce" else all_gather
        rounds = [steps_of(group, size, machine.ranks_per_node) for group in groups]
        steps = [[m for of in at_once for m in of] for at_once in zip(*rounds, strict=True)]
        planned = max(collective_cost(kind, group, size, machine).total for group in groups)
        name = f"{kind.replace('_', '-')} of {byte_size(size)} among {len(groups[0]):,}"
        return Movement(name, times, steps, planned)

    def _groups(self, axes: Sequence[str]) -> Iterator[tuple[int, ...]]:
        """Yield the ranks that differ along some axes only, for each place along the others."""
        others = [axis for axis in self.axes if axis not in axes]
        for place in product(*(range(self.topology.extent(axis)) for axis in others)):
            start = dict.fromkeys(self.axes, 0) | dict(zip(others, place, strict=True))
            yield self.topology.peers(self.topology.rank(start), axes)


def all_reduce(group: Sequence[int], size: float, per_node: int) -> list[Step]:
    """Return the messages of a sum: within nodes, then between them, each rank with its share.

    Each level scatters the sums by recursive halving and gathers them by doubling, as Thakur,
    Rabenseifner and Gropp have it (2005).

    Raises
    ------
    ValueError
        Where the ranks on a node, or the nodes, are no power of two.
    """
    members, across = _levels(group, per_node)
    inside = _halving(members, size)
    between = _halving(across, size / len(members[0]))
    return [*inside, *between, *reversed(between), *reversed(inside)]


def all_gather(group: Sequence[int], size: float, per_node: int) -> list[Step]:
    """Return the messages by which all get what each has: between nodes, then within them.

    In every step of a level, what a rank has doubles.

    Raises
    ------
    ValueError
        As `all_reduce` does.
    """
    members, across = _levels(group, per_node)
    between = _halving(across, size * len(members))
    inside = _halving(members, size * len(group))
    return [*reversed(between), *reversed(inside)]


def _levels(group: Sequence[int], per_node: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ranks of each node, and the first ranks of all nodes, then the second ones."""
    nodes: dict[int, list[int]] = {}
    for rank in group:
        nodes.setdefault(rank // per_node, []).append(rank)
    members = list(nodes.values())
    return members, [list(ranks) for ranks in zip(*members, strict=True)]


def _halving(groups: Sequence[Sequence[int]], size: float) -> list[Step]:
    """Return the steps of groups that scatter their sums by halves, all at the same time."""
    count = len(groups[0])
    if count & (count - 1):
        raise ValueError(f"{count} ranks are no power of two; choose a grid of such extents")
    steps = []
    for k in reversed(range(int(log2(count)))):
        size /= 2
        steps.append([(g[i], g[i ^ (1 << k)], size) for g in groups for i in range(count)])
    return steps


def simulated(movements: Sequence[Movement], ranks: int, machine: Machine) -> list[float]:
    """Return the seconds of each movement by SimGrid, which another Python runs.

    Raises
    ------
    RuntimeError
        Where that Python has no SimGrid, or fails.
    """

    def numbers(where: str, sharing: int) -> tuple[float, float]:
        total = machine.links[where].total
        latency = total.at(0)
        return latency, sharing * 2.0**30 / (total.at(2**30) - latency)

    given = {
        "nodes": -(-ranks // machine.ranks_per_node),
        "ranks_per_node": machine.ranks_per_node,
        "leaf": LEAF,
        "within": numbers("within", 1),
        "between": numbers("between", machine.ranks_per_node),
        "phases": [movement.steps for movement in movements],
    }
    python = os.environ.get("PYTHON_WITH_SIMGRID", "/usr/bin/python3")
    script = Path(__file__).with_name("simgrid_fat_tree.py")
    end = subprocess.run(
        [python, str(script)], input=json.dumps(given), capture_output=True, text=True
    )
    if end.returncode:
        raise RuntimeError(
            f"{python} has not simulated the messages; install python3-simgrid, or name another by "
            f"PYTHON_WITH_SIMGRID: {end.stderr[-500:]}"
        )
    took: list[float] = json.loads(end.stdout)
    return took


def section(trace: Trace, machine: Machine) -> str:
    """Return the comparison of a trace as a table."""
    movements = list(trace.movements(machine))
    took = simulated(movements, trace.ranks, machine)
    rows = [["movement", "in a step", "planner", "SimGrid", "SimGrid over planner"]]
    for m, seconds in zip(movements, took, strict=True):
        times = (f"{x * 1e6:,.0f} us" for x in (m.planned, seconds))
        rows.append([m.name, str(m.times), *times, f"{seconds / m.planned:.2f}"])
    planned = sum(m.times * m.planned for m in movements)
    found = sum(m.times * seconds for m, seconds in zip(movements, took, strict=True))
    times = (f"{x * 1e3:.2f} ms" for x in (planned, found))
    rows.append(["all, one after another", "", *times, f"{found / planned:.2f}"])
    title = f"## {trace.name} on ({trace.topology}), {trace.ranks:,} ranks"
    return f"{title}\n\n{markdown(rows)}\n"


def main(machine: Path, traces: Sequence[Path]) -> None:
    """Print the comparison of all traces."""
    described = Machine.load(machine)
    print(f"# Messages on a fat tree with contention, and as planned: {described.name}\n")
    print("Written by `python -m benchmarks.contention`; its meaning: docs/reference/scaling.md.\n")
    for path in traces:
        print(section(Trace(json.loads(path.read_text())), described), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
