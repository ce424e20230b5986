"""Scaling studies: the cases of one, their times and predictions, and the file that keeps them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from statistics import median

from distconv.data.durable import write_atomically
from distconv.geometry.layout import dimension_names
from distconv.geometry.topology import AXES
from distconv.planning.alternation import Spread, spread
from distconv.planning.prediction import in_words

FORMAT = 1
"""The version of the files."""

STRONG, WEAK = "strong", "weak"


@dataclass
class Case:
    """A training step on one grid."""

    grid: dict[str, int]
    """Ranks along the axes that have several."""
    shapes: list[tuple[int, ...]]
    """The global shape of each input."""
    measured: bool = True
    """Whether it is run; else it is predicted only."""
    seconds: list[float] = field(default_factory=list)
    """Of a step on the slowest rank, round by round."""
    predicted: float | None = None
    """Seconds of a step."""

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return prod(self.grid.values())

    @property
    def name(self) -> str:
        """Return the grid, as a command line has it."""
        return in_words(self.grid)

    @property
    def time(self) -> Spread | None:
        """Return the median and the quartiles of the measured seconds; None without any."""
        if len(self.seconds) < 2:
            return Spread(*self.seconds * 3) if self.seconds else None
        return spread(self.seconds)


@dataclass
class Study:
    """Cases of strong scaling, the same step on more ranks, or of weak scaling, a larger one.

    All cases are timed in turns, round by round, so that rounds can be compared.
    """

    kind: str
    module: str
    """What makes the module, as a command line names it."""
    cases: list[Case]
    facts: dict[str, str] = field(default_factory=dict)
    """What it was measured on, and how: alike in all rounds."""
    machine: str | None = None
    """Which machine model has predicted it."""

    @property
    def rounds(self) -> int:
        """Return the rounds that are complete."""
        return min((len(case.seconds) for case in self.measured), default=0)

    @property
    def measured(self) -> list[Case]:
        """Return the cases that are run."""
        return [case for case in self.cases if case.measured]

    @property
    def base(self) -> Case | None:
        """Return the case others are compared with: the fastest measured on the fewest ranks."""
        return _fastest_of_fewest(
            [(case, median(case.seconds)) for case in self.measured if case.seconds]
        )

    @property
    def predicted_base(self) -> Case | None:
        """Return the same of predictions: the measured base, where that is predicted."""
        base = self.base
        if base is not None and base.predicted is not None:
            return base
        found = [(c, c.predicted) for c in self.cases if c.predicted is not None]
        return _fastest_of_fewest(found)

    def efficiency(self, case: Case) -> Spread | None:
        """Return what part of the ideal speed a case reaches, paired by rounds; None without times.

        The ideal step of strong scaling takes as many times less as there are more ranks, that of
        weak scaling as long as the base.
        """
        base = self.base
        if base is None or not case.seconds:
            return None
        share = self._share(base, case)
        ratios = [b * share / s for b, s in zip(base.seconds, case.seconds, strict=False)]
        return Spread(*ratios * 3) if len(ratios) < 2 else spread(ratios)

    def predicted_efficiency(self, case: Case) -> float | None:
        """Return the same of the predictions."""
        base = self.predicted_base
        if base is None or base.predicted is None or case.predicted is None:
            return None
        return base.predicted * self._share(base, case) / case.predicted

    def _share(self, base: Case, case: Case) -> float:
        return base.ranks / case.ranks if self.kind == STRONG else 1.0

    def ideal(self, ranks: int) -> float | None:
        """Return the seconds of the ideal step on so many ranks: as measured, or else predicted."""
        base = self.base
        seconds = median(base.seconds) if base is not None else None
        if seconds is None:
            base = self.predicted_base
            seconds = None if base is None else base.predicted
        if base is None or seconds is None:
            return None
        return seconds * base.ranks / ranks if self.kind == STRONG else seconds

    def save(self, path: Path) -> None:
        """Write the study as JSON; the file is whole at any moment."""
        text = json.dumps({"format": FORMAT} | asdict(self), indent=1)
        write_atomically(path, lambda file: file.write(text.encode()))

    @classmethod
    def load(cls, path: Path) -> Study:
        """Return the study of a file that `save` has written.

        Raises
        ------
        ValueError
            For a file that is none, naming what is missing.
        """
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
            raise ValueError(f"{str(path)!r} is no scaling study: {what}") from None

    def resumed_from(self, earlier: Study) -> Study:
        """Return this study with the rounds and predictions that an earlier one of the same has.

        Raises
        ------
        ValueError
            Where the earlier one is of something else, or was measured elsewhere.
        """
        mine, theirs = self._identity(), earlier._identity()
        for what, value in mine.items():
            if theirs.get(what) != value:
                raise ValueError(
                    f"the study was begun with {what} {theirs.get(what)}, and this one has "
                    f"{value}; give the same, or choose another --output"
                )
        rounds = earlier.rounds
        known = {case.name: case for case in earlier.cases}
        for case in self.cases:
            before = known.get(case.name)
            if before is not None:
                case.seconds = before.seconds[:rounds] if case.measured else []
                case.predicted = before.predicted if earlier.machine == self.machine else None
        return self

    def _identity(self) -> dict[str, object]:
        cases = {case.name: case.shapes for case in self.measured}
        return {"kind": self.kind, "module": self.module, "measured cases": cases, **self.facts}


def _fastest_of_fewest(cases: Sequence[tuple[Case, float]]) -> Case | None:
    if not cases:
        return None
    return min(cases, key=lambda found: (found[0].ranks, found[1]))[0]


def cases_of(
    kind: str,
    shapes: Sequence[tuple[int, ...]],
    grids: Sequence[Mapping[str, int]],
    measured: bool = True,
) -> list[Case]:
    """Return a case for each grid.

    Parameters
    ----------
    shapes: the global shape of each input; of a weak study that of one rank, of which a grid makes
        a dimension as many times as long as it has ranks along the axis of its name.

    Raises
    ------
    ValueError
        For a grid that appears twice, an axis that there is not, and one that cannot be grown.
    """
    found: dict[str, Case] = {}
    for grid in grids:
        extents = {axis: n for axis, n in grid.items() if n > 1}
        name = in_words(extents)
        if name in found:
            raise ValueError(f"the grid {name} appears twice; give each once")
        for axis, n in grid.items():
            if axis not in AXES or n < 1:
                raise ValueError(f"{axis}={n} is no axis with ranks; choose from {', '.join(AXES)}")
        grown = [_grown(shape, extents) if kind == WEAK else shape for shape in shapes]
        found[name] = Case(extents, grown, measured)
    return list(found.values())


def _grown(shape: tuple[int, ...], extents: Mapping[str, int]) -> tuple[int, ...]:
    names = dimension_names(len(shape))
    for axis, ranks in extents.items():
        if axis in ("channel", "filter") or axis not in names:
            raise ValueError(
                f"an input of shape {shape} cannot grow along {axis}={ranks}; weak scaling takes "
                f"grids of {', '.join(name for name in names if name != 'channel')}"
            )
    return tuple(n * extents.get(name, 1) for n, name in zip(shape, names, strict=True))


def usual_grid(kind: str, shape: Sequence[int], ranks: int) -> dict[str, int]:
    """Return the grid that a study takes when none is given.

    In weak scaling every rank has samples of its own; in strong scaling all ranks cut each sample,
    into blocks as near to cubes as can be.
    """
    if kind == WEAK:
        return {"sample": ranks}
    names = dimension_names(len(shape))[2:]
    if not names:
        return {"sample": ranks}
    sizes = shape[2:]

    def surface(extents: tuple[int, ...]) -> tuple[float, list[int]]:
        blocks = [n / e for n, e in zip(sizes, extents, strict=True)]
        # Faces towards neighbours, of which an inner block has two in each dimension.
        sent = sum(prod(blocks) / b * min(e - 1, 2) for b, e in zip(blocks, extents, strict=True))
        # Of equal ones, that which cuts the first dimension most: rows are contiguous.
        return sent, [-e for e in extents]

    ordered = sorted(_factorings(ranks, len(names)), key=surface)
    return dict(zip(names, ordered[0], strict=True))


def _factorings(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write a number as an ordered product of so many factors."""
    if parts == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for others in _factorings(number // first, parts - 1):
                yield (first, *others)
