"""Scaling studies: a training step on increasing numbers of ranks, timed, predicted and saved."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from math import ceil, prod
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from distconv.data.durable import write_atomically
from distconv.device.kinds import wait_for_device
from distconv.geometry.layout import Layout, dimension_names
from distconv.geometry.topology import AXES
from distconv.grid.process_grid import ProcessGrid
from distconv.model.parallelize import no_sync, parallelize
from distconv.planning.machine import Machine
from distconv.planning.prediction import in_words, predict
from distconv.planning.recorded_step import LOSSES, OPTIMIZERS, dtype_of, with_checkpoints
from distconv.planning.search import grids_of
from distconv.planning.table import Cell, milliseconds
from distconv.tensor.dist_tensor import DistTensor, local_box
from distconv.tensor.memory_format import in_sample_format
from distconv.tensor.redistribution import cuts_of_layout
from distconv.transport.interface import ObjectCommunicator
from distconv.transport.torch import TorchCommunicator

if TYPE_CHECKING:
    from mpi4py import MPI


# Timing functions on all ranks of a job, or on some of them while the others sleep.


SHORTEST = 0.01
"""The least seconds of a measurement; functions that take less are called several times."""


@dataclass(frozen=True)
class Contender:
    """A function to be timed in turn with others, and the ranks and threads that run it."""

    run: Callable[[], object]
    threads: int = 1
    ranks: int | None = None
    """The number of ranks that run the function, from rank 0 on, while the others sleep; by default
    all."""


class Spread(NamedTuple):
    """The median of several measurements, and their quartiles."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the quartiles of `values`; of a single value, that value thrice."""
    if len(values) == 1:
        return Spread(*values, *values, *values)
    low, median, high = quantiles(values, method="inclusive")
    return Spread(median, low, high)


def warm_up(comm: MPI.Intracomm | ObjectCommunicator, sides: Sequence[Contender]) -> list[float]:
    """Return the seconds of one call of each function in `sides`, after two calls. Collective."""
    for side in sides:
        timed(comm, side, 2)
    return [timed(comm, side, 1) for side in sides]


def sleep_until_all_are_here(comm: MPI.Intracomm | ObjectCommunicator) -> None:
    """Wait for all ranks of `comm`, asleep; MPI's own barrier keeps a core busy. Collective."""
    if isinstance(comm, TorchCommunicator):
        comm.allgather(None)  # gloo sleeps while it waits
        return
    of_mpi: Any = comm
    request = of_mpi.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)


def timed(comm: MPI.Intracomm | ObjectCommunicator, side: Contender, repeats: int) -> float:
    """Return the seconds per call of `side.run` on the slowest rank, of `repeats`. Collective."""
    threads = torch.get_num_threads()
    torch.set_num_threads(side.threads)
    sleep_until_all_are_here(comm)
    # After this all-gather all ranks are awake, and start together.
    comm.allgather(None)
    start = time.perf_counter()
    if side.ranks is None or comm.rank < side.ranks:
        for _ in range(repeats):
            side.run()
    elapsed = time.perf_counter() - start
    torch.set_num_threads(threads)
    sleep_until_all_are_here(comm)
    return max(comm.allgather(elapsed)) / repeats


FORMAT = 1
"""The version of the format of study files."""

STRONG, WEAK = "strong", "weak"

Make = Callable[[], nn.Module]


@dataclass
class Case:
    """One case of a scaling study: a training step on one grid, with its times."""

    grid: dict[str, int]
    """Ranks along the axes with more than one rank."""
    shapes: list[tuple[int, ...]]
    """The global shape of each input."""
    measured: bool = True
    """Whether the step is timed; otherwise it is only predicted."""
    seconds: list[float] = field(default_factory=list)
    """Measured seconds of a step on the slowest rank, one entry for each round."""
    predicted: float | None = None
    """The predicted seconds of a step."""

    @property
    def ranks(self) -> int:
        """Return the number of ranks of the grid."""
        return prod(self.grid.values())

    @property
    def name(self) -> str:
        """Return the grid as on a command line, such as "sample=2,height=4"."""
        return in_words(self.grid)

    @property
    def time(self) -> Spread | None:
        """Return the median and the quartiles of the measured seconds; None if there are none."""
        return spread(self.seconds) if self.seconds else None


@dataclass
class Study:
    """A scaling study: one step on different numbers of ranks (strong), or steps that grow (weak).

    In each round every case is timed once, so that cases of a round can be compared.
    """

    kind: str
    module: str
    """The name of the function that makes the module, as on a command line."""
    cases: list[Case]
    facts: dict[str, str] = field(default_factory=dict)
    """The conditions of the measurement, the same in all rounds."""
    machine: str | None = None
    """The name of the machine model used for the predictions."""

    @property
    def rounds(self) -> int:
        """Return the number of rounds in which every measured case was timed."""
        return min((len(case.seconds) for case in self.measured), default=0)

    @property
    def measured(self) -> list[Case]:
        """Return the cases that are timed, without those that are only predicted."""
        return [case for case in self.cases if case.measured]

    @property
    def base(self) -> Case | None:
        """Return the reference case: the fastest of the timed cases on the fewest ranks."""
        found = [case for case in self.measured if case.seconds]
        return min(found, key=lambda c: (c.ranks, median(c.seconds)), default=None)

    @property
    def predicted_base(self) -> Case | None:
        """Return the reference case of predictions; None if no case is predicted.

        The measured reference case is used if it has a prediction. Otherwise the reference is the
        predicted case with the fewest ranks, and among several the fastest.
        """
        base = self.base
        if base is not None and base.predicted is not None:
            return base
        found = [case for case in self.cases if case.predicted is not None]
        return min(found, key=lambda c: (c.ranks, c.predicted), default=None)

    def efficiency(self, case: Case) -> Spread | None:
        """Return a case's parallel efficiency, ideal over measured seconds: median and quartiles.

        The ideal step on r times the ranks of the reference case takes 1/r of the reference time of
        the same round in strong scaling, and the same time in weak scaling. Returns None if the
        case was not timed.
        """
        base = self.base
        if base is None or not case.seconds:
            return None
        share = self._share(base, case.ranks)
        return spread([b * share / s for b, s in zip(base.seconds, case.seconds, strict=False)])

    def predicted_efficiency(self, case: Case) -> float | None:
        """Return the ideal seconds over the predicted seconds of a case; None if not predicted."""
        base = self.predicted_base
        if base is None or base.predicted is None or case.predicted is None:
            return None
        return base.predicted * self._share(base, case.ranks) / case.predicted

    def _share(self, base: Case, ranks: int) -> float:
        return base.ranks / ranks if self.kind == STRONG else 1.0

    def ideal(self, ranks: int) -> float | None:
        """Return the seconds of an ideal step on `ranks` ranks; None if no case has a time.

        The reference is the measured reference case or, without one, the predicted reference case.
        """
        base = self.base or self.predicted_base
        seconds = base and (median(base.seconds) if base.seconds else base.predicted)
        return seconds * self._share(base, ranks) if base and seconds else None

    def rows(self) -> list[list[Cell]]:
        """Return a table of the cases: the headings, then a row for each case."""
        found: list[list[Cell]] = [[*_HEADING]]
        for case in self.cases:
            time, guess = case.time, case.predicted
            off = None if guess is None or time is None else guess / time.median - 1
            found.append(
                [
                    (str(case.ranks), case.ranks),
                    case.name,
                    " ".join("x".join(map(str, s)) for s in case.shapes),
                    *_quartiles(time, milliseconds),
                    *_quartiles(self.efficiency(case), lambda value: f"{value:.1%}"),
                    "" if guess is None else (milliseconds(guess), guess),
                    "" if off is None else (f"{off:+.0%}", abs(off)),
                ]
            )
        return found

    def save(self, path: Path) -> None:
        """Write the study as JSON to a new file, which replaces an old one in one step."""
        text = json.dumps({"format": FORMAT} | asdict(self), indent=1)
        write_atomically(path, lambda file: file.write(text.encode()))

    @classmethod
    def load(cls, path: Path) -> Study:
        """Return the study in a file; raise ValueError, with the reason, if the file has none."""
        try:
            given = json.loads(path.read_text())
            if given.pop("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            cases = [Case(**case) for case in given.pop("cases")]
            for case in cases:
                case.shapes = [tuple(shape) for shape in case.shapes]
            return cls(cases=cases, **given)
        except OSError as error:
            raise ValueError(f"cannot read {str(path)!r}: {error.strerror}") from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{str(path)!r} is not a scaling study: {what}") from None

    def resumed_from(self, earlier: Study) -> Study:
        """Add the rounds and predictions of an earlier study to this study, and return this study.

        Raises ValueError if the earlier study has another kind, module, measured cases or facts.
        """
        mine, theirs = self._identity(), earlier._identity()
        for what, value in mine.items():
            if theirs.get(what) != value:
                raise ValueError(
                    f"the study was begun with {what} {theirs.get(what)}, but this study has "
                    f"{value}; use the same value, or choose another --output"
                )
        known = {case.name: case for case in earlier.cases}
        for case in self.cases:
            before = known.get(case.name)
            if before is not None:
                case.seconds = before.seconds[: earlier.rounds] if case.measured else []
                case.predicted = before.predicted if earlier.machine == self.machine else None
        return self

    def _identity(self) -> dict[str, object]:
        cases = {case.name: case.shapes for case in self.measured}
        return {"kind": self.kind, "module": self.module, "measured cases": cases, **self.facts}


_HEADING = (
    *("ranks", "grid", "shape", "time", "quartiles", "efficiency", "quartiles", "predicted"),
    "off by",
)


def _quartiles(spread: Spread | None, text: Callable[[float], str]) -> tuple[Cell, Cell]:
    if spread is None:
        return "", ""
    median, low, high = spread
    return (text(median), median), f"{text(low)} to {text(high)}"


def cases_of(
    kind: str,
    shapes: Sequence[tuple[int, ...]],
    grids: Iterable[Mapping[str, int]],
    measured: bool = True,
) -> list[Case]:
    """Return a case for each grid, with inputs of the given shapes.

    `kind` is "strong" or "weak". For weak scaling `shapes` are the shapes on one rank: each
    dimension is multiplied by the ranks along the axis of its name. `measured` is whether the cases
    are timed, or only predicted. Raises ValueError for a grid that appears twice, an unknown axis,
    and an axis whose dimension cannot grow.
    """
    found: dict[str, Case] = {}
    for grid in grids:
        extents = {axis: n for axis, n in grid.items() if n > 1}
        name = in_words(extents)
        if name in found:
            raise ValueError(f"the grid {name} appears twice; name each grid once")
        for axis, n in grid.items():
            if axis not in AXES or n < 1:
                raise ValueError(
                    f"{axis}={n} is not an axis with ranks; choose from {', '.join(AXES)}"
                )
        grown = [_grown(shape, extents) if kind == WEAK else shape for shape in shapes]
        found[name] = Case(extents, grown, measured)
    return list(found.values())


def _grown(shape: tuple[int, ...], extents: Mapping[str, int]) -> tuple[int, ...]:
    names = dimension_names(len(shape))
    for axis, ranks in extents.items():
        if axis in ("channel", "filter") or axis not in names:
            raise ValueError(
                f"an input of shape {shape} cannot grow along {axis}={ranks}; weak scaling "
                f"supports grids of {', '.join(name for name in names if name != 'channel')}"
            )
    return tuple(n * extents.get(name, 1) for n, name in zip(shape, names, strict=True))


def usual_grid(kind: str, shape: Sequence[int], ranks: int) -> dict[str, int]:
    """Return the default grid of `ranks` ranks for a study of a `kind`, "strong" or "weak".

    In weak scaling every rank has its own samples. In strong scaling each sample, of global
    `shape`, is partitioned over all ranks, into blocks as near to cubes as possible.
    """
    names, sizes = dimension_names(len(shape))[2:], shape[2:]
    if kind == WEAK or not names:
        return {"sample": ranks}

    def surface(grid: Mapping[str, int]) -> tuple[float, list[int]]:
        parts = [grid.get(name, 1) for name in names]
        blocks = [n / e for n, e in zip(sizes, parts, strict=True)]
        # The faces towards neighbours: an inner block has two in each dimension.
        sent = sum(prod(blocks) / b * min(e - 1, 2) for b, e in zip(blocks, parts, strict=True))
        # Among equal grids, the one that partitions the first dimension most: rows are contiguous.
        return sent, [-e for e in parts]

    return min(grids_of(ranks, (1, 1, *[ranks] * len(names)), names), key=surface)


def measure(
    study: Study,
    make: Make,
    comm: MPI.Intracomm | ObjectCommunicator,
    rounds: int,
    *,
    threads: int = 1,
    step: Mapping[str, Any] | None = None,
    finished: Callable[[int], object] = lambda rounds: None,
) -> None:
    """Time the measured cases until each has `rounds` rounds. Collective on `comm`.

    A case runs on the first ranks, on a communicator of their own, while the others sleep. In each
    round every case is timed once, in reverse order in every second round; a case that takes less
    than 10 ms is repeated. A step is forward, loss, backward and optimizer, on random numbers.
    Parameters and inputs of all cases are in memory at once. Raises ValueError on every rank, if a
    case has more ranks than `comm`.

    Parameters
    ----------
    study: the study, the same on all ranks; the times are added on all ranks.
    make: makes the module, the same on every rank and each time.
    threads: threads of each rank.
    step: options of `predict` and `parallelize` for the step.
    finished: called on every rank after each round, with the number of complete rounds.
    """
    cases = study.measured
    most = max((case.ranks for case in cases), default=1)
    if most > comm.size:
        raise ValueError(
            f"the largest case has {most} ranks, but {comm.size} have been started; start mpiexec "
            f"-n {most} python -m distconv scale ..."
        )
    if study.rounds >= rounds or not cases:
        return
    sides = []
    for case in cases:
        mine = comm.rank < case.ranks
        run = training_step(case, make, **(step or {})) if mine else lambda: None
        sides.append(Contender(run, threads, ranks=case.ranks))
    repeats = [ceil(SHORTEST / seconds) for seconds in warm_up(comm, sides)]
    for number in range(study.rounds, rounds):
        order = range(len(cases)) if number % 2 == 0 else reversed(range(len(cases)))
        took = {i: timed(comm, sides[i], repeats[i]) for i in order}
        for i, case in enumerate(cases):
            case.seconds.append(took[i])
        finished(study.rounds)


def training_step(
    case: Case,
    make: Make,
    *,
    dtype: torch.dtype | None = None,
    layout: Layout | None = None,
    loss: str = "mse",
    optimizer: str = "sgd",
    autocast: torch.dtype | None = None,
    checkpoint: str | Sequence[str] = (),
    accumulate: int = 1,
    offload: bool = False,
    **options: Any,
) -> Callable[[], None]:
    """Return a function that runs a training step of a case. Collective on the ranks of the case.

    All ranks of the case also call the function together. `make` makes the module; the other
    arguments are options of the step, as for `record_step`.
    """
    extents: dict[str, Any] = dict(case.grid)
    grid = ProcessGrid(tuple(range(case.ranks)), **extents)
    module = with_checkpoints(make(), checkpoint)
    dtype = dtype or dtype_of(module)
    module = parallelize(module, grid, **options)
    parameters = list(module.parameters())
    taken = OPTIMIZERS[optimizer](parameters) if parameters else None
    inputs = []
    for shape in case.shapes:
        # All ranks draw the same numbers, as ranks may be replicas.
        numbers = torch.Generator().manual_seed(0)
        mine = torch.randn(local_box(shape, grid, layout).shape, dtype=dtype, generator=numbers)
        mine = in_sample_format(mine, shape, cuts_of_layout(layout, grid, len(shape)), grid)
        inputs.append(DistTensor.from_local(mine, grid, layout, shape=shape))
    kind = grid.device.type

    def pass_of_a_batch() -> None:
        with (
            torch.autocast(kind, autocast, enabled=autocast is not None),
            save_on_cpu(pin_memory=grid.computes_on_gpu) if offload else nullcontext(),
        ):
            value = LOSSES[loss](module(*inputs))
        if taken is not None:
            value.backward()

    def step() -> None:
        for _ in range(accumulate - 1):
            with no_sync(module):
                pass_of_a_batch()
        pass_of_a_batch()
        if taken is not None:
            taken.step()
            taken.zero_grad()
        wait_for_device(grid.device)

    return step


def predict_all(
    study: Study,
    make: Make,
    machine: Machine,
    *,
    step: Mapping[str, Any] | None = None,
    predicted: Callable[[Case], object] = lambda case: None,
) -> None:
    """Predict the seconds of all cases without a prediction. Call it in one process.

    On a measured machine, this times the local operators without times, so the other ranks must
    sleep. `step` has options of `predict`; `predicted` is called with each case that is done.
    Raises as `predict` does, for the first case that cannot be predicted.
    """
    for case in study.cases:
        if case.predicted is None:
            case.predicted = predict(
                make(), case.shapes, case.grid, machine, **(step or {})
            ).seconds
            predicted(case)
