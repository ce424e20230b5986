"""One rank of each of several cuts, timed alone, and the predicted time of a step of all ranks.

A shard is one rank of a grid that is not there: it computes and packs, and its messages go nowhere.
Its bound is the plain network on a block of the same shape. What it gives to its transport is
known, and the planner says what that would take on the machines that are described in `machines`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.gpu.cases import Case, Step, cut, module, plain
from benchmarks.gpu.clock import Run, alternate, peak_of
from benchmarks.measuring.report import Row, of_bytes, over
from benchmarks.measuring.settings import by
from distconv import method
from distconv.comm.ledger import trace_movements, without_counting
from distconv.comm.packing import pack_messages
from distconv.device.kinds import is_accelerator
from distconv.ops.conv.functions import METHODS
from distconv.planning.dry_run import DryRunGrid
from distconv.planning.machine import Machine, names_of_machines
from distconv.planning.recording import Start
from distconv.planning.table import table
from distconv.planning.timeline import collective_cost, messages_cost
from distconv.tensor.dist_tensor import local_box
from distconv.tensor.ownership import own

Cut = Mapping[str, int]

PLANE: tuple[Cut, ...] = tuple(
    {"height": h, "width": w} for h, w in ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4))
)
VOLUME: tuple[Cut, ...] = tuple(
    {"depth": d, "height": h, "width": w}
    for d, h, w in ((1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 2, 2), (4, 2, 2))
)


class Shard(NamedTuple):
    """The measurements of the slowest rank of a cut."""

    grid: DryRunGrid
    seconds: float
    """Seconds of a step in which no message takes time."""
    traffic: Sequence[Start]
    """Messages and reductions that the rank starts in a step."""
    weights: int
    """Bytes of the rank's parameters, whose gradients all ranks add up."""


def shards(
    case: Case, cuts: Sequence[Cut], device: torch.device, seconds: float
) -> Iterator[Row | str]:
    """Yield rows for the shards of each cut, and predictions from them.

    If the first cut is of one rank, later ones have their peak memory over the share of its peak.
    """
    known: list[Shard] = []
    serial = 0
    for extents in cuts:
        grid = DryRunGrid(extents, gpu=is_accelerator(device))
        row = "shards", case.name, f"{axes_of(grid)}, {by(local_box(case.shape, grid).shape)}"
        rows, shard = _timed(row, case, grid, device, seconds)
        yield from rows
        known.append(shard)
        peak = peak_of(device, partial(_overlapped, case, grid, device))
        if grid.size == 1:
            serial = peak
        elif serial:
            yield of_bytes(row, "peak memory over the share", peak, serial / grid.size)
    for name in names_of_machines():
        yield predictions(case, Machine.load(name), known)


def axes_of(grid: DryRunGrid) -> str:
    return ", ".join(f"{axis}={n}" for axis, n in grid.shape.items() if n > 1) or "whole"


def _overlapped(case: Case, grid: DryRunGrid, device: torch.device) -> Step:
    step = case.step(network_alone(case, device), *cut(case, grid, device))
    return partial(forced, "overlapped", step)


def network_alone(case: Case, device: torch.device) -> nn.Module:
    """Return the module of one rank; nobody adds up its gradients, as the others are not there."""
    network = module(case, device)
    own(network.parameters(), ranks=1)
    return network


def _timed(
    row: tuple[str, str, str], case: Case, grid: DryRunGrid, device: torch.device, seconds: float
) -> tuple[list[Row], Shard]:
    network = network_alone(case, device)
    step = case.step(network, *cut(case, grid, device))
    runs: list[Run] = [partial(forced, name, step) for name in METHODS]
    runs += [plain(case, grid, device), packing(step, grid, device)]
    *each, bound, packs = alternate(device, runs, seconds)
    rows = [
        over(row, f"{name}, over no halos", times.device, bound.device, None)
        for name, times in zip(METHODS, each, strict=True)
    ]
    overlapped = each[METHODS.index("overlapped")]
    rows.append(over(row, "host, over no halos", overlapped.host, bound.host, None))
    if grid.size > 1:
        measure = "packing of the forward pass, over the step"
        rows.append(over(row, measure, packs.device, overlapped.device, None))
    shard = Shard(grid, median(overlapped.device), traffic_of(step, grid), parameter_bytes(network))
    return rows, shard


def traffic_of(step: Step, grid: DryRunGrid) -> Sequence[Start]:
    """Return the messages and reductions that a rank of a dry grid starts in a step."""
    with listening(grid) as traffic:
        forced("overlapped", step)
    return traffic


def parameter_bytes(network: nn.Module) -> int:
    return sum(p.nbytes for p in network.parameters())


def methods(case: Case, extents: Cut, device: torch.device, seconds: float) -> Iterator[Row]:
    """Yield the time of a shard that is overlapped over its time assembled."""
    grid = DryRunGrid(extents, gpu=is_accelerator(device))
    block = local_box(case.shape, grid).shape
    step = case.step(network_alone(case, device), *cut(case, grid, device))
    runs = [partial(forced, name, step) for name in ("overlapped", "assembled")]
    overlapped, assembled = alternate(device, runs, seconds)
    row = "methods", case.name, f"{axes_of(grid)}, {prod(block):.1e} elements"
    yield over(row, "overlapped, over assembled", overlapped.device, assembled.device, None)


@contextmanager
def listening(grid: DryRunGrid) -> Iterator[list[Start]]:
    """Yield a list of the movements that a dry grid starts within the context, in order."""
    heard: list[Start] = []
    before, grid.transport.started = grid.transport.started, heard.append
    try:
        yield heard
    finally:
        grid.transport.started = before


def forced(name: str, step: Step) -> None:
    with method(name):
        step()


def packing(step: Step, grid: DryRunGrid, device: torch.device) -> Run:
    """Return a function that packs the messages that a rank sends in the forward pass of a step."""
    with trace_movements() as movements, without_counting():
        forced("overlapped", step)
    shapes = [m.plan.buffer_shape if m.adjoint else m.plan.block_shape for m in movements]
    memory = torch.zeros(max(map(prod, shapes), default=0), device=device)
    blocks = [memory[: prod(shape)].view(shape) for shape in shapes]

    def run() -> None:
        for block, m in zip(blocks, movements, strict=True):
            pack_messages(block, m.plan, grid, of_block=not m.adjoint)

    return run


class Prediction(NamedTuple):
    """The predicted seconds of the parts of a step."""

    shard: float
    reductions: float
    """Seconds of the reductions of statistics and losses, which nothing hides."""
    halos: float
    gradients: float

    @property
    def hidden(self) -> float:
        """Return the seconds of a step if all halos and the reduction of gradients are hidden."""
        return self.shard + self.reductions

    @property
    def exposed(self) -> float:
        """Return the seconds of a step if no halos and no reductions of gradients are hidden."""
        return self.hidden + self.halos + self.gradients


def predict(machine: Machine, shard: Shard) -> Prediction:
    """Predict the time of a step with the links of `machine` and the GPU that was measured."""
    rank, size = shard.grid.rank, shard.grid.size
    others = tuple((peer, shard.weights) for peer in range(size) if peer != rank)
    collective, halos = (
        _seconds(machine, rank, (t for t in shard.traffic if (t.collective is not None) is kind))
        for kind in (True, False)
    )
    gradients = _seconds(machine, rank, [Start(0, "all_reduce", others, ())])
    return Prediction(shard.seconds, collective, halos, gradients)


def _seconds(machine: Machine, rank: int, traffic: Iterable[Start]) -> float:
    """Return the seconds of exchanges and reductions, one after another; all-gathers count as
    reductions.
    """
    total = 0.0
    for start in traffic:
        messages = start.arriving
        if start.collective is None:
            total += messages_cost(rank, messages, (), machine).total
        elif messages:
            ranks = sorted((rank, *(peer for peer, _ in messages)))
            total += collective_cost("all_reduce", ranks, messages[0][1], machine).total
    return total


_HEADING = (
    *("GPUs", "shard", "reductions", "halos", "gradients", "step, all hidden to nothing hidden"),
    *("over 1 GPU", "over 2 GPUs"),
)


def predictions(case: Case, machine: Machine, shards: Sequence[Shard]) -> str:
    """Return a table of the strong scaling that follows from the shards of several cuts."""
    steps = {shard.grid.size: predict(machine, shard) for shard in shards}
    rows: list[tuple[str, ...]] = [_HEADING]
    for size, step in steps.items():
        parts = (f"{part * 1e3:.3f} ms" for part in step)
        taken = f"{step.hidden * 1e3:.3f} to {step.exposed * 1e3:.3f} ms"
        rows.append((str(size), *parts, taken, *(_gain(steps, n, size) for n in (1, 2))))
    lines = [f"{case.name}, predicted for {machine.name}", table(rows, right=range(5))]
    return "\n".join([*lines, *filter(None, [case.published and f"published: {case.published}"])])


def _gain(steps: Mapping[int, Prediction], fewer: int, more: int) -> str:
    """Return the speedup of `more` GPUs over `fewer`, from the smaller to the larger prediction."""
    if fewer not in steps or fewer >= more:
        return ""
    base, step = steps[fewer], steps[more]
    gains = sorted((base.hidden / step.hidden, base.exposed / step.exposed))
    return " to ".join(f"{gain:.2f}" for gain in gains)
