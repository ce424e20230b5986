"""`predict`: the time and memory of a training step on a grid that need not exist.

The time is the critical path through all ranks' work, after Dryden et al., "Improving
Strong-Scaling of CNN Training by Exploiting Finer-Grained Parallelism" (IPDPS 2019), section V.
Operators, messages and overlap are recorded in a dry run of the library's own code.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from distconv.geometry.topology import AXES
from distconv.planning.dry_run import DryRunGrid
from distconv.planning.machine import Machine
from distconv.planning.operators import OperatorTimes
from distconv.planning.recorded_step import record_step, shapes_of
from distconv.planning.recording import Compute, Recording
from distconv.planning.table import Cell, byte_size, milliseconds, size_cell, table, time_cell
from distconv.planning.timeline import Segment, Timeline, check_ranks, play, union_length

PLAYED = 4
"""The largest number of ranks that are all simulated. Of a larger grid, the first, the middle and
the last rank are simulated."""


@dataclass(frozen=True)
class LayerTime:
    """The seconds of one layer in a predicted step, on the slowest rank, and its saved bytes."""

    name: str
    kind: str
    """The type of the layer; "" for the loss, the sum of gradients and the optimizer."""
    forward: float
    """Seconds of local operators in the forward pass."""
    backward: float
    """Seconds of local operators in the backward pass, or of the optimizer."""
    host: float
    """Seconds of Python that the device waits for."""
    exposed: float
    """Seconds in which the rank waits for messages, or starts messages."""
    hidden: float
    """Seconds in which messages are in flight while the rank does other work: from their start
    until the rank waits for them."""
    kept: int
    """Bytes kept for the backward pass."""
    shape: tuple[int, ...] | None
    """The shape of the rank's block of the output; None if the output is not a DistTensor."""

    @property
    def seconds(self) -> float:
        """Return the layer's seconds in the step, without messages that overlap with other work."""
        return self.forward + self.backward + self.host + self.exposed

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Return the layer's row in a table with the columns of `LAYER_HEADING`."""
        shape = "" if self.shape is None else "x".join(map(str, self.shape))
        times = (time_cell(getattr(self, what)) for what in LAYER_HEADING[3:8])
        return (self.name, self.kind, shape, *times, size_cell(self.kept))


LAYER_HEADING = (
    *("layer", "type", "local output", "forward", "backward", "host", "exposed", "hidden", "kept"),
)
"""The headings of a table of layers; times are in milliseconds."""


@dataclass(frozen=True)
class Prediction:
    """A training step on a grid, as `predict` returns it: seconds and memory; prints as a table.

    Examples
    --------
    >>> machine = dc.planning.Machine.load("frontier")
    >>> net = nn.Conv3d(1, 16, 3, padding=1)
    >>> step = dc.planning.predict(net, (1, 1, 256, 256, 256), {"depth": 8}, machine)
    >>> print(step)
    Conv3d on depth=8 of Frontier (described), assumed: 1.772 ms a step, 1.772 ms a sample
    layer      type    local output     forward  backward   host  exposed   hidden     kept
    Conv3d     Conv3d  1x16x32x256x256   0.3777     0.426  0.004           0.01966  8.5 MiB
    loss                                 0.4294    0.3246            0.12
    gradients                                        0.02         0.06008
    optimizer                                        0.01
    total                                0.8071    0.7806  0.004   0.1801  0.01966  401 MiB
    times in ms, of rank 0; memory at most 401 MiB: ...
    """

    module: str
    machine: str
    assumed: bool
    """Whether the machine's numbers are described, not measured."""
    grid: dict[str, int]
    """Ranks along the axes with more than one rank."""
    samples: int
    """Samples of a mini-batch."""
    seconds: float
    """Seconds of a step on the slowest rank: forward, loss, backward and optimizer."""
    rank: int
    """The slowest rank."""
    layers: tuple[LayerTime, ...]
    memory: dict[str, int]
    """Bytes by kind on the rank with the highest peak, at the moment of that peak."""
    critical_path: tuple[Segment, ...] = field(repr=False, default=())

    @property
    def seconds_per_sample(self) -> float:
        """Return the seconds of a step over the samples of the mini-batch."""
        return self.seconds / max(self.samples, 1)

    @property
    def peak(self) -> int:
        """Return the most bytes that a rank holds at any moment."""
        return sum(self.memory.values())

    @property
    def compute(self) -> float:
        """Return the seconds of local operators on the slowest rank."""
        return sum(layer.forward + layer.backward for layer in self.layers)

    @property
    def host(self) -> float:
        """Return the seconds in which the slowest rank's device waits for Python."""
        return sum(layer.host for layer in self.layers)

    @property
    def exposed(self) -> float:
        """Return the seconds in which the slowest rank waits for messages, or starts messages."""
        return sum(layer.exposed for layer in self.layers)

    @property
    def hidden(self) -> float:
        """Return the seconds of messages in flight while the slowest rank does other work."""
        return sum(layer.hidden for layer in self.layers)

    @property
    def longest(self) -> list[tuple[str, str, str, float]]:
        """Return the critical path summed by (layer, phase, activity), longest seconds first."""
        shares: dict[tuple[str, str, str], float] = defaultdict(float)
        for s in self.critical_path:
            shares[s.place.layer, s.place.phase, s.what] += s.stop - s.start
        ordered = sorted(shares.items(), key=lambda entry: -entry[1])
        return [(*key, seconds) for key, seconds in ordered]

    def __str__(self) -> str:
        sums = (sum(getattr(x, what) for x in self.layers) for what in LAYER_HEADING[3:8])
        total = "total", "", "", *map(time_cell, sums), size_cell(self.peak)
        rows = [LAYER_HEADING, *(layer.cells for layer in self.layers), total]
        path = ", ".join(
            f"{layer or 'between'} {phase} {what} {seconds * 1e3:.4g}"
            for layer, phase, what, seconds in self.longest[:6]
        )
        held = ", ".join(f"{kind} {byte_size(n)}" for kind, n in self.memory.items() if n)
        assumed = ", assumed" if self.assumed else ""
        return "\n".join(
            (
                f"{self.module} on {in_words(self.grid)} of {self.machine}{assumed}: "
                f"{milliseconds(self.seconds)} a step, {milliseconds(self.seconds_per_sample)} a "
                "sample",
                table(rows),
                f"times in ms, of rank {self.rank}; memory at most {byte_size(self.peak)}: {held}",
                f"critical path: {path}",
            )
        )


def predict(
    module: nn.Module,
    shape: Sequence[int] | Sequence[Sequence[int]],
    grid: Mapping[str, int],
    machine: Machine,
    **options: Any,
) -> Prediction:
    """Return the time and memory of a training step on a grid, which need not exist.

    Call it in one process. If `machine` was measured, local operators without a time are timed
    here, and added to `machine`: run on that machine itself, with nothing else running.

    Raises UnsupportedOperation if the module cannot run on the grid. Raises RuntimeError if the
    step raises, for example for a module that reads the elements of a tensor, or operators cannot
    be timed. Raises ValueError for a machine without the times that are needed.

    Parameters
    ----------
    module: any torch.nn.Module, before `parallelize`.
    shape: the global shape of the input, or a sequence of shapes, one for each input.
    grid: the ranks along the axes, such as {"sample": 2, "height": 2}.
    machine: the result of `Machine.load(path)`. `python -m distconv calibrate` measures a machine
        and writes the file; names such as "h100" are machines that distconv describes.
    options: options of the step, as for `record_step`: `layout`, `dtype`, `loss`, `optimizer`,
        `autocast`, `checkpoint`, `accumulate`, `offload`, and options of `parallelize`, such as
        `layouts`, `shard_parameters` and `shard`.

    Examples
    --------
    >>> machine = dc.planning.Machine.load("frontier")
    >>> net = nn.Sequential(nn.Conv3d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv3d(16, 1, 1))
    >>> step = dc.planning.predict(net, (1, 1, 512, 512, 512), {"depth": 4, "height": 2}, machine)
    >>> round(1000 * step.seconds, 1), step.peak // 2**20
    (20.6, 3201)
    """
    shapes = shapes_of(shape)
    check_ranks(machine, DryRunGrid(grid, 0).size)
    recordings = record_ranks(module, shapes, grid, gpu=machine.asynchronous, **options)
    ranks = recordings[0].ranks
    times = OperatorTimes(machine, machine.at_once(ranks))
    times.prepare(operator for r in recordings for operator in r.operators)
    return predicted(type(module).__name__, shapes[0][0], grid, recordings, machine, times)


def record_ranks(
    module: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    grid: Mapping[str, int],
    **options: Any,
) -> list[Recording]:
    """Return recordings of a step on all ranks of a grid, or on three if it has over `PLAYED`.

    The three are the first rank, the rank in the middle of every axis, and the last rank. `options`
    are options of `record_step`.
    """
    topology = DryRunGrid(grid, 0).topology
    ranks = list(range(topology.size))
    if topology.size > PLAYED:
        middle = topology.rank({axis: topology.extent(axis) // 2 for axis in AXES})
        ranks = [0, middle, topology.size - 1]
    return [record_step(module, shapes, grid, rank=rank, **options) for rank in ranks]


def predicted(
    name: str,
    samples: int,
    grid: Mapping[str, int],
    recordings: Sequence[Recording],
    machine: Machine,
    times: OperatorTimes,
) -> Prediction:
    """Return the prediction of a step from the recordings of some ranks.

    `name` is the module's name and `samples` the size of the mini-batch, for the result; `machine`
    has the times of messages and of Python, and `times` the times of all recorded local operators.
    """
    line = play(recordings, machine, times)
    slowest = next(r for r in recordings if r.rank == line.slowest)
    memory = max((memory_of(r, times) for r in recordings), key=lambda m: sum(m.values()))
    return Prediction(
        name,
        machine.name,
        machine.assumed,
        {axis: n for axis, n in grid.items() if n > 1},
        samples,
        line.seconds,
        line.slowest,
        _layers(slowest, line),
        memory,
        tuple(line.critical_path()),
    )


def memory_of(recording: Recording, times: OperatorTimes) -> dict[str, int]:
    """Return a rank's peak bytes by kind, where "workspace" is temporary memory of convolutions."""
    most = recording.peak
    for event in recording.events:
        if isinstance(event, Compute) and "convolution" in event.operator.name:
            most = max(most, event.live + times.workspace(event.operator))
    return recording.memory | {"workspace": most - recording.peak}


def in_words(grid: Mapping[str, int], between: str = ",") -> str:
    """Return a grid as a command line spells it, such as "sample=2,height=4", without axes of 1.

    `between` is the text between two axes, by default a comma.
    """
    return between.join(f"{axis}={n}" for axis, n in grid.items() if n > 1) or "1 rank"


def _layers(recording: Recording, line: Timeline) -> tuple[LayerTime, ...]:
    sums: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(LAYER_HEADING[3:8], 0.0))
    for s in line.segments[recording.rank]:
        what = {"wait": "exposed", "communication": "exposed"}.get(s.what, s.what)
        if what == "compute":
            what = "forward" if s.place.phase == "forward" else "backward"
        sums[s.place.layer][what] += s.stop - s.start
    under_way: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for p in line.passages[recording.rank]:
        under_way[p.place.layer].append((p.start, p.stop))
    for layer, intervals in under_way.items():
        sums[layer]["hidden"] = union_length(intervals)
    types, kept, shapes = recording.layers, recording.kept, recording.shapes
    return tuple(
        LayerTime(name, types.get(name, ""), **sums[name], kept=kept[name], shape=shapes.get(name))
        for name in dict.fromkeys((*types, *sums))
        if any(sums[name].values()) or kept[name]
    )
