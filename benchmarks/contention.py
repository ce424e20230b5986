"""Messages on a fat tree, by SimGrid with all their contention, beside the planner's links.

    python -m benchmarks.contention MODULE:FACTORY --shape ... --grid ... --machine FILE

Other options are those of `python -m distconv predict`. A training step is recorded, and every
different exchange and collective in it is simulated with all ranks at once, and compared with what
the planner takes for the slowest rank. SimGrid is that of the system's Python (Debian:
python3-simgrid); PYTHON_WITH_SIMGRID names another.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import log2
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from distconv.geometry.topology import AXES, Topology
from distconv.planning.machine import Machine
from distconv.planning.recorded_step import record_step, shapes_of
from distconv.planning.recording import Start
from distconv.planning.table import byte_size, markdown
from distconv.planning.timeline import collective_cost, messages_cost
from distconv.tools.command_line import (
    add_grid_option,
    add_step_options,
    loaded,
    module_from,
    step_options,
)

Step: TypeAlias = list[tuple[int, int, float]]
"""Messages that start at the same time: from and to which rank, and their bytes."""

LEAF = 18
"""Nodes on a switch of 36 ports, which has as many links upwards."""


Away: TypeAlias = tuple[tuple[int, ...], int]
"""How many ranks away along each axis another rank is, and the bytes that it sends or gets."""


class Event(NamedTuple):
    """An exchange or collective as a recorded rank starts it, its peers by their distances."""

    collective: str | None
    """`all_reduce` or `all_gather`; None for an exchange."""
    arriving: tuple[Away, ...]
    leaving: tuple[Away, ...]


class Movement(NamedTuple):
    """An exchange or collective of a step, with the messages of all ranks."""

    name: str
    times: int
    """How often a step has it."""
    steps: list[Step]
    planned: float
    """Seconds that the planner takes for the slowest rank."""


class Trace(NamedTuple):
    """The messages of a step on all ranks of a grid, from the records of a few.

    Along each axis the first, the middle and the last rank are recorded, along `sample` the first
    alone. A recorded rank stands for all ranks of its kind: all between the ends of an axis, and
    all samples, so uneven blocks are treated as even.
    """

    name: str
    topology: Topology
    kinds: Sequence[int]
    """The kind of each rank."""
    starts: Sequence[Mapping[int, Event]]
    """By kind, the exchanges and collectives by their numbers."""

    def movements(self, machine: Machine) -> Iterator[Movement]:
        """Yield the exchanges and collectives of a step, equal ones once, with their number."""
        found: dict[tuple[Event | None, ...], int] = Counter()
        for number in sorted(set().union(*self.starts)):
            found[tuple(of.get(number) for of in self.starts)] += 1
        for events, times in found.items():
            event = next(event for event in events if event is not None)
            if event.collective is None:
                yield self._exchange(events, times, machine)
            else:
                yield self._collective(event, times, machine)

    def _exchange(self, events: Sequence[Event | None], times: int, machine: Machine) -> Movement:
        step: Step = []
        slowest, most = 0.0, 0
        for rank, kind in enumerate(self.kinds):
            event = events[kind] or Event(None, (), ())
            arriving, leaving = (self._peers(rank, side) for side in event[1:])
            step += [(peer, rank, size) for peer, size in arriving]
            slowest = max(slowest, messages_cost(rank, arriving, leaving, machine).total)
            most = max(most, sum(size for _, size in arriving))
        return Movement(f"halos of up to {byte_size(most)} a rank", times, [step], slowest)

    def _peers(self, rank: int, side: Sequence[Away]) -> list[tuple[int, int]]:
        here = _coordinates(self.topology, rank)
        return [
            (_rank_at(self.topology, [a + b for a, b in zip(here, by, strict=True)]), size)
            for by, size in side
        ]

    def _collective(self, event: Event, times: int, machine: Machine) -> Movement:
        kind, size = event.collective or "", event.arriving[0][1]
        along = [any(offsets) for offsets in zip(*(by for by, _ in event.arriving), strict=True)]
        groups = [list(group) for group in self._groups(along)]
        steps_of = all_reduce if kind == "all_reduce" else all_gather
        rounds = [steps_of(group, size, machine.ranks_per_node) for group in groups]
        steps = [[m for of in at_once for m in of] for at_once in zip(*rounds, strict=True)]
        planned = max(collective_cost(kind, group, size, machine).total for group in groups)
        name = f"{kind.replace('_', '-')} of {byte_size(size)} among {len(groups[0]):,}"
        return Movement(name, times, steps, planned)

    def _groups(self, along: Sequence[bool]) -> Iterator[tuple[int, ...]]:
        """Yield the ranks that differ along some axes only, for each place along the others."""
        extents = zip(self.topology.extents, along, strict=True)
        axes = [axis for axis, varies in zip(AXES, along, strict=True) if varies]
        for place in product(*(range(1 if varies else n) for n, varies in extents)):
            yield self.topology.peers(_rank_at(self.topology, place), axes)


def recorded(
    module: nn.Module,
    shape: Sequence[int] | Sequence[Sequence[int]],
    grid: Mapping[str, int],
    **options: Any,
) -> Trace:
    """Return the messages of a step on all ranks of a grid; options are those of `predict`."""
    topology = Topology(tuple(grid.get(axis, 1) for axis in AXES))
    places = [_stands_for(topology, rank) for rank in range(topology.size)]
    kinds = sorted(set(places))
    starts = []
    for place in kinds:
        rank = _rank_at(topology, place)
        record = record_step(module, shapes_of(shape), grid, rank=rank, **options)
        starts.append(
            {e.number: _event(e, rank, topology) for e in record.events if isinstance(e, Start)}
        )
    return Trace(type(module).__name__, topology, [kinds.index(place) for place in places], starts)


def _event(start: Start, rank: int, topology: Topology) -> Event:
    me = _coordinates(topology, rank)

    def away(side: Sequence[tuple[int, int]]) -> tuple[Away, ...]:
        there = ((_coordinates(topology, peer), size) for peer, size in side)
        return tuple(
            (tuple(b - a for a, b in zip(me, at, strict=True)), size) for at, size in there
        )

    return Event(start.collective, away(start.arriving), away(start.leaving))


def _coordinates(topology: Topology, rank: int) -> tuple[int, ...]:
    return tuple(topology.coordinates(rank).values())


def _rank_at(topology: Topology, place: Sequence[int]) -> int:
    return topology.rank(dict(zip(AXES, place, strict=True)))


def _stands_for(topology: Topology, rank: int) -> tuple[int, ...]:
    """Return the coordinates of the recorded rank that stands for `rank`."""
    places = zip(AXES, _coordinates(topology, rank), topology.extents, strict=True)
    return tuple(
        0 if axis == "sample" else n // 2 if 0 < index < n - 1 else index
        for axis, index, n in places
    )


def all_reduce(group: Sequence[int], size: float, per_node: int) -> list[Step]:
    """Return the steps of an all-reduce of `size` bytes: within nodes, then between, by shares.

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
    """Return the steps of an all-gather of `size` bytes a rank: between nodes, then within.

    Each step of a level doubles the data of a rank.

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
    """Return the steps of a reduce-scatter by recursive halving, of all groups at once."""
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
    took = simulated(movements, trace.topology.size, machine)
    rows = [["movement", "in a step", "planner", "SimGrid", "SimGrid over planner"]]
    for m, seconds in zip(movements, took, strict=True):
        times = (f"{x * 1e6:,.0f} us" for x in (m.planned, seconds))
        rows.append([m.name, str(m.times), *times, f"{seconds / m.planned:.2f}"])
    planned = sum(m.times * m.planned for m in movements)
    found = sum(m.times * seconds for m, seconds in zip(movements, took, strict=True))
    times = (f"{x * 1e3:.2f} ms" for x in (planned, found))
    rows.append(["all, one after another", "", *times, f"{found / planned:.2f}"])
    title = f"## {trace.name} on ({trace.topology}), {trace.topology.size:,} ranks"
    return f"{title}\n\n{markdown(rows)}\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the comparison of the step that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.contention", description=__doc__)
    add_step_options(parser)
    add_grid_option(parser)
    given = parser.parse_args(arguments)
    machine, module = loaded(given.machine), module_from(given.factory, given.seed)
    options = step_options(given) | {"gpu": machine.asynchronous}
    print(section(recorded(module, given.shape, given.grid, **options), machine))


if __name__ == "__main__":
    main()
