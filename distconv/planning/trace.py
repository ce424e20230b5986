"""The messages of a step for a network simulator: who sends what to whom, and computes between.

Ranks at like places of a grid do alike: a record is kept for each kind of place (first, last, and
between, along each axis), with other ranks told by how far away they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from distconv.data.durable import write_atomically
from distconv.geometry.topology import AXES, Topology
from distconv.planning.machine import Machine
from distconv.planning.operators import OperatorTimes
from distconv.planning.recorded_step import record_step, shapes_of
from distconv.planning.recording import Compute, HostWork, Recording, Start
from distconv.planning.timeline import host_seconds

FORMAT = 1
"""The version of the files."""


def message_trace(
    module: nn.Module,
    shape: Sequence[int] | Sequence[Sequence[int]],
    grid: Mapping[str, int],
    machine: Machine,
    **options: Any,
) -> dict[str, Any]:
    """Return the step of all ranks of a grid as lists of events (see `export_trace`).

    Options are those of `predict`. The middle of an axis stands for all but its ends, and the first
    samples for all, so that uneven blocks count as these.
    """
    topology = Topology(tuple(grid.get(axis, 1) for axis in AXES))
    shapes = shapes_of(shape)
    every = map(_place(topology), range(topology.size))
    places = [tuple(_stands_for(topology, place)) for place in every]
    kinds = sorted(set(places))
    ranks = [topology.rank(dict(zip(AXES, place, strict=True))) for place in kinds]
    options["gpu"] = machine.asynchronous
    recordings = [record_step(module, shapes, grid, rank=rank, **options) for rank in ranks]
    times = OperatorTimes(machine, machine.at_once(topology.size))
    times.prepare(operator for r in recordings for operator in r.operators)
    return {
        "format": FORMAT,
        "module": type(module).__name__,
        "machine": machine.name,
        "axes": list(AXES),
        "extents": list(topology.extents),
        "ranks_per_node": machine.ranks_per_node,
        "kind_of_rank": [kinds.index(place) for place in places],
        "events": [_events(r, topology, machine, times) for r in recordings],
    }


def export_trace(
    path: Path,
    module: nn.Module,
    shape: Sequence[int] | Sequence[Sequence[int]],
    grid: Mapping[str, int],
    machine: Machine,
    **options: Any,
) -> None:
    """Write the step of all ranks of a grid as JSON.

    `kind_of_rank` has for each rank the number of its list in `events`. An event is one of

    - `["compute", seconds]`
    - `["exchange", number, arriving, leaving]`, each a list of `[offsets, bytes]`, where the other
      rank's coordinates are this one's plus the offsets, an entry for each of `axes`
    - `["all_reduce", number, axes, bytes]` and `["all_gather", ...]`, among the ranks that differ
      from this one along these axes
    - `["wait", number]`
    """
    text = json.dumps(message_trace(module, shape, grid, machine, **options))
    write_atomically(path, lambda file: file.write(text.encode()))


def _place(topology: Topology) -> Callable[[int], tuple[int, ...]]:
    """Return the function from a rank to its coordinates."""
    return lambda rank: tuple(topology.coordinates(rank).values())


def _stands_for(topology: Topology, place: Sequence[int]) -> Iterator[int]:
    """Yield the coordinates of the rank that stands for this one; samples have no neighbours."""
    for axis, index, extent in zip(AXES, place, topology.extents, strict=True):
        inner = index not in (0, extent - 1)
        yield 0 if axis == "sample" else extent // 2 if inner else index


def _events(
    recording: Recording, topology: Topology, machine: Machine, times: OperatorTimes
) -> list[list[Any]]:
    place_of = _place(topology)
    me = place_of(recording.rank)
    events: list[list[Any]] = []
    work = 0.0

    def close() -> None:
        nonlocal work
        if work:
            events.append(["compute", work])
        work = 0.0

    def away(side: Sequence[tuple[int, int]]) -> list[list[Any]]:
        places = ((place_of(peer), size) for peer, size in side)
        return [[[b - a for a, b in zip(me, there, strict=True)], size] for there, size in places]

    for event in recording.events:
        if isinstance(event, Compute):
            work += times[event.operator]
        elif isinstance(event, HostWork):
            work += 0.0 if machine.asynchronous else host_seconds(event, machine)
        elif isinstance(event, Start):
            close()
            if event.collective is None:
                events.append(["exchange", event.number, away(event.arriving), away(event.leaving)])
            else:
                axes = {
                    axis
                    for peer, _ in event.arriving
                    for axis, a, b in zip(AXES, me, place_of(peer), strict=True)
                    if a != b
                }
                named = [axis for axis in AXES if axis in axes]
                events.append([event.collective, event.number, named, event.arriving[0][1]])
        else:
            close()
            events.append(["wait", event.number])
    close()
    return events
