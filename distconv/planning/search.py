"""`plan`: the best grid for a module, a mini-batch and a number of ranks.

Grids are ranked by predicted time. If no grid fits into memory, the plan lists changes that reduce
the memory of a step.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distconv.geometry.layout import dimension_names
from distconv.geometry.topology import AXES
from distconv.model.sample_shards import SHARDS
from distconv.planning.dry_run import DryRunGrid, without_elements
from distconv.planning.machine import Machine
from distconv.planning.operators import OperatorTimes
from distconv.planning.prediction import (
    Prediction,
    in_words,
    memory_of,
    predicted,
    record_ranks,
)
from distconv.planning.recorded_step import BLOCKS, record_step, shapes_of
from distconv.planning.recording import Recording
from distconv.planning.table import Cell, byte_size, size_cell, table, time_cell
from distconv.planning.timeline import check_ranks

MOST_WITH_FILTER = 256
"""The largest number of ranks for which grids with a `filter` axis are tried by default; with this
axis there are several times as many grids."""

REFINED = 4
"""The number of best grids that are predicted from several ranks, not from the middle rank
alone."""

BUDGET = 45.0
"""Seconds from the beginning of a search after which no more local operators are timed."""
_AT_LEAST = 5.0
"""The least seconds of timing, however long the recordings took."""
SPACES_BUDGET = 5.0
"""Seconds for timing the convolutions of each `WayOut`, by which the bytes that they allocate are
found."""

Progress = Callable[[str], object]


@dataclass(frozen=True)
class Candidate:
    """A grid that `plan` tried: its prediction, and the reason if it is excluded."""

    grid: dict[str, int]
    prediction: Prediction | None
    refusal: str | None = None
    """The reason why the grid is excluded: an unsupported operator, or memory; None if it fits."""

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Return the candidate's row in a table with the columns of `GRID_HEADING`."""
        p, refusal = self.prediction, self.refusal or ""
        if p is None:
            return (in_words(self.grid), *("",) * 6, refusal)
        times = p.seconds_per_sample, p.seconds, p.compute, p.host, p.exposed
        return (in_words(self.grid), *map(time_cell, times), size_cell(p.peak), refusal)


GRID_HEADING = ("grid", "a sample", "a step", "compute", "host", "exposed", "memory", "")
"""The headings of a table of grids; times are in milliseconds."""


@dataclass(frozen=True)
class WayOut:
    """A change that reduces the memory of a step, such as bfloat16, if no grid fits."""

    what: str
    peak: int
    """The most bytes that a rank holds with the change."""
    fits: bool


@dataclass(frozen=True)
class GridPlan:
    """The result of `plan`: grids for a number of ranks, the best first; prints as a table.

    Examples
    --------
    >>> machine = dc.planning.Machine.load("frontier")
    >>> net = nn.Conv3d(1, 16, 3, padding=1)
    >>> axes = ["sample", "depth"]
    >>> found = dc.planning.plan(net, (2, 1, 256, 256, 256), 4, machine, axes=axes)
    >>> print(found)
    Conv3d on 4 ranks of Frontier (described), assumed: depth=4
    grid              a sample  a step  compute   host  exposed    memory
    depth=4              3.153   6.307     6.12  0.004   0.1831  1.56 GiB
    sample=2,depth=2     3.157   6.314     6.19  0.004   0.1201  1.56 GiB
    times in ms; 2 grids fit, 0 do not
    sample=2,depth=2 takes 0.1% longer: 0.035 ms more computing a sample, ...
    """

    module: str
    machine: str
    assumed: bool
    ranks: int
    memory: int | None
    """Bytes of memory that a rank may use; None for no limit."""
    candidates: tuple[Candidate, ...]
    """The grids that fit, by time per sample; then the excluded grids."""
    ways_out: tuple[WayOut, ...] = ()
    """Changes that reduce the memory of a step, if no grid fits."""

    @property
    def fitting(self) -> list[Prediction]:
        """Return the predictions of the grids that fit, the best first."""
        return [
            c.prediction for c in self.candidates if c.refusal is None and c.prediction is not None
        ]

    @property
    def best(self) -> Prediction:
        """Return the best grid's prediction; raise ValueError, with `ways_out`, if none fits."""
        fitting = self.fitting
        if not fitting:
            raise ValueError(self.nothing_fits)
        return fitting[0]

    @property
    def grid(self) -> dict[str, int]:
        """Return the best grid, as the ranks along its axes, for `ProcessGrid`."""
        return self.best.grid

    @property
    def nothing_fits(self) -> str:
        """Return a message that no grid fits, with the changes in `ways_out`."""
        least = [c.prediction.peak for c in self.candidates if c.prediction is not None]
        if not least:
            reasons = dict.fromkeys(c.refusal for c in self.candidates)
            why = "; ".join(map(str, reasons))
            return f"no grid of {self.ranks} ranks can run {self.module}: {why}"
        has = "" if self.memory is None else f", and has {byte_size(self.memory)}"
        lines = [
            f"no grid of {self.ranks} ranks fits: a rank needs at least "
            f"{byte_size(min(least))}{has}"
        ]
        lines += [
            f"  {way.what}: {byte_size(way.peak)}, which "
            f"{'fits' if way.fits else 'does not fit either'}"
            for way in self.ways_out
        ]
        return "\n".join(lines)

    @property
    def reason(self) -> str:
        """Return a sentence on where the second best grid loses time against the best."""
        if len(self.fitting) < 2:
            return "no other grid fits"
        first, second = self.fitting[:2]
        longer = second.seconds_per_sample / first.seconds_per_sample - 1
        parts = []
        for what in ("compute", "host", "exposed"):
            a, b = (getattr(p, what) / max(p.samples, 1) for p in (first, second))
            if abs(b - a) > 1e-3 * first.seconds_per_sample:
                more = "more" if b > a else "less"
                name = {"compute": "computing", "host": "Python", "exposed": "waiting"}[what]
                parts.append(f"{abs(b - a) * 1e3:.3g} ms {more} {name} a sample")
        if not parts:
            return f"{in_words(second.grid)} takes the same time within 0.1%"
        return f"{in_words(second.grid)} takes {longer:.1%} longer: {', '.join(parts)}"

    def __str__(self) -> str:
        if not self.fitting:
            return self.nothing_fits
        rows = [
            GRID_HEADING,
            *((*c.cells[:-1], (c.refusal or "")[:100]) for c in self.candidates[:12]),
        ]
        assumed = ", assumed" if self.assumed else ""
        out = sum(c.refusal is not None for c in self.candidates)
        return "\n".join(
            (
                f"{self.module} on {self.ranks} ranks of {self.machine}{assumed}: "
                f"{in_words(self.grid)}",
                table(rows),
                f"times in ms; {len(self.fitting)} grids fit, {out} do not",
                self.reason,
            )
        )


def grids_of(
    ranks: int, shape: Sequence[int], axes: Sequence[str] | None = None
) -> Iterator[dict[str, int]]:
    """Yield all grids of `ranks` ranks on which every block of an input has elements.

    A grid is a dictionary of the ranks along its axes, and `shape` the global shape of the input.
    `axes` are the grid axes that may have several ranks; by default the dimensions of the input,
    and `filter` beside `channel`. Raises ValueError for an unknown axis.
    """
    names = dimension_names(len(shape))
    most = {name: n for name, n in zip(names, shape, strict=True) if name in AXES}
    most["filter"] = ranks
    allowed = [axis for axis in AXES if axis in (most if axes is None else axes)]
    for axis in axes or ():
        if axis not in AXES:
            raise ValueError(f"{axis!r} is not an axis of a grid; choose from {', '.join(AXES)}")

    def split(left: int, rest: Sequence[str]) -> Iterator[dict[str, int]]:
        if not rest:
            if left == 1:
                yield {}
            return
        axis, *others = rest
        for n in range(1, min(left, most.get(axis, 1)) + 1):
            if left % n == 0:
                for more in split(left // n, others):
                    yield ({axis: n} if n > 1 else {}) | more

    for grid in split(ranks, allowed):
        # Filters are partitioned only together with channels.
        if "filter" not in grid or "channel" in grid:
            yield grid


def plan(
    module: nn.Module,
    shape: Sequence[int] | Sequence[Sequence[int]],
    ranks: int,
    machine: Machine,
    *,
    memory: int | None = None,
    axes: Sequence[str] | None = None,
    progress: Progress = lambda what: None,
    **options: Any,
) -> GridPlan:
    """Return the grids of `ranks` ranks, ranked by predicted time per sample.

    Call it in one process; for a measured machine on the machine itself, as operators may be timed.

    Raises ValueError for numbers of ranks without any grid, for wrong axes, and for a machine
    without the times that are needed.

    Parameters
    ----------
    module, shape, options: as for `predict`.
    memory: bytes that a rank may use; the machine's memory, if known, when not given.
    axes: the grid axes that may have several ranks; by default all axes of the input, without
        `filter` beyond `MOST_WITH_FILTER` ranks.
    progress: called with a line of text at each step of the search.

    Examples
    --------
    >>> machine = dc.planning.Machine.load("frontier")
    >>> net = nn.Sequential(nn.Conv3d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv3d(16, 1, 1))
    >>> found = dc.planning.plan(net, (2, 1, 256, 256, 256), 8, machine, axes=["sample", "depth"])
    >>> found.grid  # for dc.ProcessGrid(**found.grid) on 8 ranks
    {'sample': 2, 'depth': 4}
    """
    shapes = shapes_of(shape)
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks={ranks!r} is not a number of ranks; expected 1 or more")
    check_ranks(machine, ranks)
    limit = machine.memory if memory is None else memory
    if axes is None and ranks > MOST_WITH_FILTER:
        axes = [axis for axis in AXES if axis != "filter"]
    chosen = list(grids_of(ranks, shapes[0], axes))
    if not chosen:
        raise ValueError(
            f"{ranks} ranks cannot be laid out over an input of shape {shapes[0]}"
            + (f" along {', '.join(axes)}" if axes else "")
            + "; choose a product of numbers up to these extents, such as a power of two"
        )
    search = _Search(
        without_elements(module, "plan"),
        shapes,
        limit,
        machine,
        OperatorTimes(machine, machine.at_once(ranks)),
        options | {"gpu": machine.asynchronous},
        progress,
        time.perf_counter() + BUDGET,
    )
    recorded, out = search.record_all(chosen)
    search.time_operators([recording for _, recording in recorded], _AT_LEAST)
    fitting, too_large = search.ranked(recorded)
    out += too_large
    out.sort(key=lambda c: (c.prediction is None, c.prediction.peak if c.prediction else 0))
    ways: list[WayOut] = []
    if recorded and not fitting and limit is not None:
        ways = search.helpful_ways_out(recorded, ranks, axes)
    tried = (*fitting, *out)
    name = type(module).__name__
    return GridPlan(name, machine.name, machine.assumed, ranks, limit, tried, tuple(ways))


_Recorded = Sequence[tuple[dict[str, int], Recording]]
"""Pairs of a grid and the recording of one of its ranks."""


def _seconds(c: Candidate) -> float:
    assert c.prediction is not None
    return c.prediction.seconds_per_sample


@dataclass
class _Search:
    """A search by `plan`: the step, the machine, and the limits of memory and time.

    No operators are timed after the moment `end`, on the clock of `time.perf_counter`.
    """

    module: nn.Module
    shapes: list[tuple[int, ...]]
    limit: int | None
    """Bytes of memory that a rank may use; None for no limit."""
    machine: Machine
    times: OperatorTimes
    options: dict[str, Any]
    progress: Progress
    end: float

    def record_all(
        self, grids: Sequence[dict[str, int]]
    ) -> tuple[list[tuple[dict[str, int], Recording]], list[Candidate]]:
        """Return grids that support the module, each with a recording; the others as candidates."""
        recorded: list[tuple[dict[str, int], Recording]] = []
        refused = []
        for i, grid in enumerate(grids):
            self.progress(f"{i + 1} of {len(grids)}: {in_words(grid)}")
            try:
                recorded.append((grid, self.record(grid)))
            except RuntimeError as refusal:
                refused.append(Candidate(grid, None, str(refusal)))
        return recorded, refused

    def ranked(self, recorded: _Recorded) -> tuple[list[Candidate], list[Candidate]]:
        """Return the grids that fit, the best first, and the grids that need too much memory.

        The first `REFINED` grids are predicted from several ranks.
        """
        tried = [self.judged(grid, [recording]) for grid, recording in recorded]
        fitting = sorted((c for c in tried if c.refusal is None), key=_seconds)
        too_large = [c for c in tried if c.refusal is not None]
        best: list[Candidate] = []
        while fitting and len(best) < REFINED:
            refined = self.refined(fitting.pop(0).grid)
            (best if refined.refusal is None else too_large).append(refined)
        return [*sorted(best, key=_seconds), *fitting], too_large

    def record(
        self, grid: Mapping[str, int], module: nn.Module | None = None, **more: Any
    ) -> Recording:
        """Return the recording of a step on one rank, whose memory and time represent all ranks.

        The rank is in the middle of every axis, or near the middle if the block there is smaller.
        `module` replaces the module of the search, and `more` adds options of the step.
        """
        sizes = dict(zip(dimension_names(len(self.shapes[0])), self.shapes[0], strict=True))
        topology = DryRunGrid(grid).topology
        place = {}
        for axis in AXES:
            parts = topology.extent(axis)
            larger = sizes.get(axis, parts) % parts
            place[axis] = min(parts // 2, larger - 1) if larger else parts // 2
        rank = topology.rank(place)
        options = self.options | more
        return record_step(module or self.module, self.shapes, grid, rank=rank, **options)

    def time_operators(self, recordings: Sequence[Recording], at_least: float = 0.0) -> None:
        """Time the operators of recordings until `end`, but for at least `at_least` seconds."""
        left = max(self.end - time.perf_counter(), at_least)
        self.times.prepare_approximately([r.operators for r in recordings], self.progress, left)

    def refined(self, grid: dict[str, int]) -> Candidate:
        """Return a grid with a prediction from recordings of several ranks."""
        self.progress(f"refined: {in_words(grid)}")
        several = record_ranks(self.module, self.shapes, grid, **self.options)
        self.time_operators(several)
        return self.judged(grid, several)

    def judged(self, grid: dict[str, int], recordings: Sequence[Recording]) -> Candidate:
        """Return a grid with its prediction, and with a reason if it needs too much memory."""
        name, samples = type(self.module).__name__, self.shapes[0][0]
        p = predicted(name, samples, grid, recordings, self.machine, self.times)
        over = self.limit is not None and p.peak > self.limit
        return Candidate(grid, p, f"needs {byte_size(p.peak)}" if over else None)

    def helpful_ways_out(
        self, recorded: _Recorded, ranks: int, axes: Sequence[str] | None
    ) -> list[WayOut]:
        """Return changes that reduce the memory of a step on the grid that needs the least.

        `recorded` has the grids that support the module, none of which fits; `ranks` and `axes` are
        as for `plan`.
        """
        peaks = [sum(memory_of(recording, self.times).values()) for _, recording in recorded]
        smallest, _ = recorded[peaks.index(min(peaks))]
        # For small modules, recomputation may need more memory than it saves.
        return [way for way in self.ways_out(smallest, ranks, axes) if way.peak < min(peaks)]

    def ways_out(
        self, grid: dict[str, int], ranks: int, axes: Sequence[str] | None
    ) -> Iterator[WayOut]:
        """Yield changes that may reduce the memory of a step, in the order of their cost in time.

        The changes are sharded weights, recomputation, both, autocast, on GPUs offloaded
        activations, and parameters of half precision; then more ranks until a grid fits. `grid` is
        the grid of `ranks` ranks that needs the least memory; `axes` is as for `plan`.
        """
        given = self.options
        extents = [dict(g) for g in grids_of(ranks, self.shapes[0], axes)]
        cut = next(g for g in (grid, {"channel": ranks}, *extents) if "channel" in g)
        over = next((g for g in (grid, *extents) if "sample" in g), None)
        ways: list[tuple[str, dict[str, int], dict[str, Any]]] = []
        if over is not None and not given.get("shard"):
            ways += [(f'shard="{name}"', over, {"shard": name}) for name in SHARDS]
        if not given.get("shard_parameters"):
            ways.append(("shard_parameters=True", cut, {"shard_parameters": True}))
        if not given.get("checkpoint"):
            ways.append(("checkpointing each block", grid, {"checkpoint": BLOCKS}))
            if over is not None and not given.get("shard"):
                both = {"shard": SHARDS[-1], "checkpoint": BLOCKS}
                ways.append((f'shard="{SHARDS[-1]}" and checkpointing each block', over, both))
        if not given.get("autocast"):
            ways.append(("autocast to bfloat16", grid, {"autocast": torch.bfloat16}))
        if self.machine.asynchronous and not given.get("offload"):
            ways.append(("activations on the host (save_on_cpu)", grid, {"offload": True}))
        for what, tried, more in ways:
            with suppress(RuntimeError):
                recording = self.record(tried, **more)
                yield self._judged_way(f"{what} on {in_words(tried)}", recording)
        with suppress(RuntimeError):
            recording = self.record(grid, copy.deepcopy(self.module).to(torch.bfloat16))
            yield self._judged_way(f"bfloat16 on {in_words(grid)}", recording)
        for factor in (2, 4, 8, 16):
            found = []
            for wider in grids_of(ranks * factor, self.shapes[0], axes):
                # Grids with at least the ranks of `grid` along each axis.
                kept = all(wider.get(axis, 1) >= n for axis, n in grid.items())
                if kept and "filter" not in wider:
                    with suppress(RuntimeError):
                        found.append((self.record(wider), wider))
            if found:
                recording, wider = min(found, key=lambda pair: pair[0].peak)
                way = self._judged_way(f"{ranks * factor} ranks as {in_words(wider)}", recording)
                yield way
                if way.fits:
                    return

    def _judged_way(self, what: str, recording: Recording) -> WayOut:
        """Return a change, described by `what`, with the memory that a step then needs.

        The convolutions in `recording` are timed, to find the bytes that they allocate.
        """
        convolutions = {o: n for o, n in recording.operators.items() if o.convolves}
        self.times.prepare_approximately([convolutions], seconds=SPACES_BUDGET)
        peak = sum(memory_of(recording, self.times).values())
        return WayOut(what, peak, self.limit is None or peak <= self.limit)
