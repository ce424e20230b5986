"""Steps as graphs of the device over plain torch's: what is left where nobody waits for the host.

They are measured in a process of their own, as a capture that fails can spoil what comes after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median

import torch

from benchmarks.gpu.cases import Case, Step, cut, module, plain
from benchmarks.gpu.clock import alternate
from benchmarks.gpu.shards import (
    Cut,
    Shard,
    axes_of,
    forced,
    network_alone,
    parameter_bytes,
    predictions,
    traffic_of,
)
from benchmarks.measuring.report import Row, over
from benchmarks.measuring.settings import by
from distconv import ProcessGrid, compile, parallelize
from distconv.device.kinds import is_accelerator
from distconv.device.streams import DeviceGraph, using, why_no_graphs
from distconv.ops.conv.functions import METHODS
from distconv.planning.dry_run import DryRunGrid
from distconv.planning.machine import Machine, names_of_machines
from distconv.tensor.dist_tensor import local_box

WARM_UP = 6
"""Calls of a compiled step before it is timed; it is replayed from the fourth on."""
TARGETS = {1: 1.02, 2: 1.10, 4: 1.15, 16: 1.3}
"""The most that a step as a graph should take, in times of plain torch's on the block, by the
number of ranks."""


def captured(step: Step, device: torch.device) -> Step:
    """Return a step as one graph of the device; a CPU, which has none, runs it as it is."""
    if why_no_graphs(device):
        return step
    side = torch.Stream(device=device)
    side.wait_stream(torch.accelerator.current_stream(device))
    with using(side):  # what is made once is made outside of the graph
        for _ in range(3):
            step()
    torch.accelerator.current_stream(device).wait_stream(side)
    return DeviceGraph(device, step).replay


def compiled(case: Case, grid: ProcessGrid) -> Step:
    """Return a step of a compiled network; all ranks of the grid call it.

    Raises
    ------
    RuntimeError
        When the step is not replayed.
    """
    network = compile(parallelize(module(case, grid.device), grid))
    step = case.step(network, *cut(case, grid, grid.device))
    for _ in range(WARM_UP):
        step()
    if not network.replays:
        raise RuntimeError(f"{case.name}: the network is not replayed")
    return step


def whole(case: Case, grid: ProcessGrid, seconds: float) -> Iterator[Row]:
    """Yield the times of compiled steps on a grid of one rank, over plain torch's."""
    bound = plain(case, grid, grid.device)
    runs = bound, compiled(case, grid), captured(bound, grid.device)
    eager, replayed, bound_as_graph = alternate(grid.device, runs, seconds)
    row = "graphs", case.name, f"1 rank, {by(case.shape)}, {grid.transport.name}"
    measure = "compiled, over plain torch's graph"
    yield over(row, measure, replayed.device, bound_as_graph.device, TARGETS[1])
    yield over(row, "host, compiled, over plain torch", replayed.host, eager.host, None)


def shards(
    case: Case, cuts: Sequence[Cut], device: torch.device, seconds: float
) -> Iterator[Row | str]:
    """Yield the times of each cut's shard as a graph, over plain torch's on the block, and
    predictions from the faster method.
    """
    known: list[Shard] = []
    for extents in cuts:
        grid = DryRunGrid(extents, gpu=is_accelerator(device))
        row = "graphs", case.name, f"{axes_of(grid)}, {by(local_box(case.shape, grid).shape)}"
        network = network_alone(case, device)
        step = case.step(network, *cut(case, grid, device))
        runs: list[Step] = [partial(forced, name, step) for name in METHODS]
        runs.append(plain(case, grid, device))
        *each, bound = alternate(device, [captured(run, device) for run in runs], seconds)
        fastest = min(each, key=lambda times: median(times.device))
        for name, times in zip(METHODS, each, strict=True):
            target = TARGETS.get(grid.size) if times is fastest else None
            yield over(row, f"{name}, over no halos", times.device, bound.device, target)
        traffic = traffic_of(step, grid)
        known.append(Shard(grid, median(fastest.device), traffic, parameter_bytes(network)))
    for name in names_of_machines():
        yield predictions(case, Machine.load(name), known)
