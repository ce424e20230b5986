"""Rows of results: how they come from times, and how they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distconv.planning.scaling import spread
from distconv.planning.table import byte_size, table
from distconv.tools.command_line import as_json


@dataclass(frozen=True)
class Row:
    """A row of results: a subject compared with a bound, or one measured quantity of it."""

    benchmark: str
    case: str
    configuration: str
    measure: str
    """The meaning of `value`: `subject` over, under or minus which `bound`."""
    unit: str
    """The unit of `value`; nothing for ratios."""
    value: float
    """A median, with its quartiles `low` and `high`."""
    low: float
    high: float
    rounds: int
    """How many measurements the median is of."""
    subject: float
    """The subject's median, in seconds, or bytes where `in_bytes`."""
    bound: float | None = None
    target: float | None = None
    at_least: bool = False
    """Whether the value should be at least the target, instead of at most."""
    in_bytes: bool = False

    @property
    def met(self) -> bool | None:
        """Return whether the target is met; None where there is none."""
        if self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target

    @property
    def verdict(self) -> str:
        """Return in words whether the target is met, or by how much it is missed."""
        if self.target is None or self.met is None:
            return ""
        return "met" if self.met else f"missed by {abs(self.value / self.target - 1):.1%}"

    def json(self) -> str:
        """Return the row as one line of JSON."""
        return as_json(self, met=self.met)


Name = tuple[str, str, str]
"""Benchmark, case and configuration of a row."""

Times = Sequence[float]


def over(row: Name, measure: str, subject: Times, bound: Times, target: float | None) -> Row:
    """Return the row of the subject's times over the bound's."""
    ratios = [s / b for s, b in zip(subject, bound, strict=True)]
    return _row(row, measure, "", ratios, subject, bound, target)


def speedup(row: Name, measure: str, subject: Times, bound: Times, target: float | None) -> Row:
    """Return the row of how many times as fast as the bound the subject is."""
    ratios = [b / s for s, b in zip(subject, bound, strict=True)]
    return _row(row, measure, "", ratios, subject, bound, target, at_least=True)


def minus(row: Name, measure: str, subject: Times, bound: Times, target: float | None) -> Row:
    """Return the row of the microseconds by which the subject takes longer than the bound."""
    differences = [(s - b) * 1e6 for s, b in zip(subject, bound, strict=True)]
    return _row(row, measure, "us", differences, subject, bound, target)


def share(row: Name, measure: str, subject: Times, bound: Times, whole: Times) -> Row:
    """Return the row of how much longer the subject takes than the bound, in percent of `whole`."""
    shares = [100 * (s - b) / w for s, b, w in zip(subject, bound, whole, strict=True)]
    return _row(row, measure, "%", shares, subject, bound, None)


def of_bytes(
    row: Name, measure: str, subject: float, bound: float, target: float | None = None
) -> Row:
    """Return the row of the subject's bytes over the bound's, which are counted once."""
    ratio = subject / bound
    return Row(*(*row, measure, "", ratio, ratio, ratio), 1, subject, bound, target, in_bytes=True)


def _row(
    row: Name,
    measure: str,
    unit: str,
    values: Times,
    subject: Times,
    bound: Times,
    target: float | None,
    at_least: bool = False,
) -> Row:
    middle = spread(subject).median, spread(bound).median
    return Row(*row, measure, unit, *spread(values), len(values), *middle, target, at_least)


_HEADING = (
    *("case", "configuration", "measure", "subject", "bound", "median", "quartiles"),
    *("target", "verdict"),
)


def as_table(rows: Sequence[Row]) -> str:
    """Return the rows as aligned columns of text."""
    return table([_HEADING, *map(_cells, rows)], right=(3, 4, 5))


def _cells(row: Row) -> tuple[str, ...]:
    sign = ">=" if row.at_least else "<="
    return (
        row.case,
        row.configuration,
        row.measure,
        _quantity(row, row.subject),
        "" if row.bound is None else _quantity(row, row.bound),
        f"{_number(row, row.value)} {row.unit}".rstrip(),
        f"{_number(row, row.low)} to {_number(row, row.high)}" if row.rounds > 1 else "",
        "" if row.target is None else f"{sign} {row.target:.4g} {row.unit}".rstrip(),
        row.verdict,
    )


def _number(row: Row, value: float) -> str:
    return f"{value:.4g}" if row.unit else f"{value:.3f}"


def _quantity(row: Row, value: float) -> str:
    if row.in_bytes:
        return byte_size(round(value))
    if value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw every row as a bar with its quartiles and its target; a panel for each unit."""
    from matplotlib.figure import Figure

    panels = [[r for r in rows if r.unit == unit] for unit in dict.fromkeys(r.unit for r in rows)]
    figure = Figure(figsize=(11, 1.2 + 0.32 * len(rows) + 0.6 * len(panels)), layout="constrained")
    axes = figure.subplots(
        len(panels), squeeze=False, gridspec_kw={"height_ratios": [len(p) + 1 for p in panels]}
    )
    for panel, ax in zip(panels, axes[:, 0], strict=True):
        values = [r.value for r in panel]
        beyond = [[r.value - r.low for r in panel], [r.high - r.value for r in panel]]
        colours = {True: "#3a7d44", False: "#d1495b", None: "0.6"}
        places = range(len(panel))
        ax.barh(places, values, xerr=beyond, color=[colours[r.met] for r in panel])
        for place, r in zip(places, panel, strict=True):
            if r.target is not None:
                ax.plot([r.target] * 2, [place - 0.45, place + 0.45], color="black")
        ax.set_yticks(places, [f"{r.case}: {r.measure}" for r in panel], fontsize=7)
        ax.invert_yaxis()
        ax.set_xlabel(panel[0].unit or "ratio; targets in black")
    figure.savefig(path, dpi=120)
