"""The messages of a step for a network simulator: who sends what to whom, and computes between.

    python -m benchmarks.trace trace.json MODULE:FACTORY --shape ... --grid ... --machine ...

Other options are those of `python -m distconv predict`. Ranks at like places of a grid do alike: a
record is kept for each kind of place (first, last, and between, along each axis), with other ranks
told by how far away they are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from distconv.data.durable import write_atomically
from distconv.geometry.topology import AXES, Topology
from distconv.planning.machine import Machine
from distconv.planning.operators import OperatorTimes
from distconv.planning.recorded_step import record_step, shapes_of
from distconv.planning.recording import Completion, Compute, HostWork, Recording
from distconv.planning.timeline import host_seconds
from distconv.tools.commands.options import add_grid_option, add_step_options, loaded, step_options
from distconv.tools.factories import module_from

FORMAT = 1
"""The version of the files."""


def export_trace(
    path: Path,
    module: nn.Module,
    shape: Sequence[int] | Sequence[Sequence[int]],
    grid: Mapping[str, int],
    machine: Machine,
    **options: Any,
) -> None:
    """Write the step of all ranks of a grid as JSON; options are those of `predict`.

    `kind_of_rank` has for each rank the number of its list in `events`. The middle of an axis is
    that of all but its ends, and the first samples those of all, so that uneven blocks count so. An
    event is one of

    - `["compute", seconds]`
    - `["exchange", number, arriving, leaving]`, each a list of `[offsets, bytes]`, where the other
      rank's coordinates are this one's plus the offsets, an entry for each of `axes`
    - `["all_reduce", number, axes, bytes]` and `["all_gather", ...]`, among the ranks that differ
      from this one along these axes
    - `["wait", number]`
    """
    topology = Topology(tuple(grid.get(axis, 1) for axis in AXES))
    places = [_stands_for(topology, rank) for rank in range(topology.size)]
    kinds = sorted(set(places))
    ranks = [topology.rank(dict(zip(AXES, place, strict=True))) for place in kinds]
    options["gpu"] = machine.asynchronous
    recordings = [record_step(module, shapes_of(shape), grid, rank=r, **options) for r in ranks]
    times = OperatorTimes(machine, machine.at_once(topology.size))
    times.prepare(operator for r in recordings for operator in r.operators)
    trace = {
        "format": FORMAT,
        "module": type(module).__name__,
        "machine": machine.name,
        "axes": list(AXES),
        "extents": list(topology.extents),
        "ranks_per_node": machine.ranks_per_node,
        "kind_of_rank": [kinds.index(place) for place in places],
        "events": [_events(r, topology, machine, times) for r in recordings],
    }
    write_atomically(path, lambda file: file.write(json.dumps(trace).encode()))


def _coordinates(topology: Topology, rank: int) -> tuple[int, ...]:
    return tuple(topology.coordinates(rank).values())


def _stands_for(topology: Topology, rank: int) -> tuple[int, ...]:
    """Return the coordinates of the rank that stands for this one; samples have no neighbours."""
    places = zip(AXES, _coordinates(topology, rank), topology.extents, strict=True)
    return tuple(
        0 if axis == "sample" else n // 2 if 0 < index < n - 1 else index
        for axis, index, n in places
    )


def _events(
    recording: Recording, topology: Topology, machine: Machine, times: OperatorTimes
) -> list[list[Any]]:
    me = _coordinates(topology, recording.rank)
    events: list[list[Any]] = []

    def away(peer: int) -> list[int]:
        there = _coordinates(topology, peer)
        return [b - a for a, b in zip(me, there, strict=True)]

    for event in recording.events:
        if isinstance(event, Compute | HostWork):
            if isinstance(event, Compute):
                work = times[event.operator]
            else:
                work = 0.0 if machine.asynchronous else host_seconds(event, machine)
            if events and events[-1][0] == "compute":
                events[-1][1] += work
            elif work:
                events.append(["compute", work])
        elif isinstance(event, Completion):
            events.append(["wait", event.number])
        elif event.collective is None:
            sides = event.arriving, event.leaving
            moved = ([[away(peer), size] for peer, size in side] for side in sides)
            events.append(["exchange", event.number, *moved])
        else:
            offsets = zip(*(away(peer) for peer, _ in event.arriving), strict=True)
            axes = [axis for axis, along in zip(AXES, offsets, strict=True) if any(along)]
            events.append([event.collective, event.number, axes, event.arriving[0][1]])
    return events


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the trace that the command line asks for."""
    parser = argparse.ArgumentParser(description="write the messages of a step for a simulator")
    parser.add_argument("trace", type=Path, metavar="TRACE.json")
    add_step_options(parser)
    add_grid_option(parser)
    given = parser.parse_args(arguments)
    machine, module = loaded(given.machine), module_from(given.factory, given.seed)
    export_trace(given.trace, module, given.shape, given.grid, machine, **step_options(given))


if __name__ == "__main__":
    main()
