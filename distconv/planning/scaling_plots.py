"""Scaling studies drawn: time beside the ideal, and efficiency, with predictions over both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distconv.planning.scaling import STRONG, Case, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLE: Any = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.4,
    "grid.alpha": 0.5,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "pdf.fonttype": 42,
    "savefig.dpi": 300,
}
"""One column of a journal: small letters that stay letters in PDF."""

SIZE = 3.4, 2.6
COLOURS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
"""Told apart by all readers: Okabe and Ito, "Color Universal Design" (2008)."""


def draw(
    studies: Sequence[tuple[str, Study]],
    path: Path,
    kind: str = "png",
) -> tuple[Path, Path]:
    """Draw the times and the efficiencies of studies of one kind, and return the two files.

    Parameters
    ----------
    studies: with the name of each, which the legend tells where there are several.
    path: the files are `path` without its ending, and `.time.png`, `.efficiency.png`.
    kind: what matplotlib can write: png, pdf or svg.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    files = []
    for what, fill in (("time", _times), ("efficiency", _efficiencies)):
        with rc_context(STYLE):
            figure = Figure(figsize=SIZE, layout="constrained")
            ax = figure.subplots()
            for colour, (name, study) in zip(_colours(), studies, strict=False):
                fill(ax, study, colour, f"{name}: " if len(studies) > 1 else "")
            ranks = sorted({c.ranks for _, study in studies for c in study.cases})
            axis_of_ranks(ax, ranks)
            ax.set_title(f"{studies[0][1].kind} scaling of {studies[0][1].module}")
            ax.legend()
            file = path.with_suffix(f".{what}.{kind}")
            figure.savefig(file)
            files.append(file)
    return files[0], files[1]


def _colours() -> Iterable[str]:
    while True:
        yield from COLOURS


def axis_of_ranks(ax: Axes, ranks: Sequence[int]) -> None:
    """Let the horizontal axis be that of ranks, with a mark for each number, as far as they fit."""
    ax.set_xscale("log", base=2)
    step = -(-len(ranks) // 12)
    ax.set_xticks(ranks[::step], [f"{n:,}" for n in ranks[::step]])
    ax.minorticks_off()
    ax.set_xlabel("ranks")


def _times(ax: Any, study: Study, colour: str, name: str) -> None:
    ranks = sorted({case.ranks for case in study.cases})
    ideal = [(n, study.ideal(n)) for n in ranks]
    if all(seconds is not None for _, seconds in ideal):
        ax.plot(*_columns(ideal, 1e3), color="0.6", linestyle=":", label=f"{name}ideal")
    measured = [(case, case.time) for case in study.measured if case.time is not None]
    points = [(c.ranks, t.median * 1e3, t.low * 1e3, t.high * 1e3) for c, t in measured if t]
    _with_quartiles(ax, points, colour, f"{name}measured")
    _predicted(ax, [(c.ranks, 1e3 * c.predicted) for c in study.cases if c.predicted], colour, name)
    _grids(ax, [(c, t.median * 1e3) for c, t in measured if t], study)
    if study.kind == STRONG:
        _axis_of_times(ax)
    else:
        ax.set_ylim(bottom=0)
    ax.set_ylabel("time of a training step (ms)")


def _axis_of_times(ax: Any) -> None:
    """Let the vertical axis be logarithmic, with plain numbers at 1, 2 and 5, or, where times are
    close together, at equal distances."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    ax.set_yscale("log")
    low, high = ax.get_ylim()
    narrow = high < 8 * low
    ax.yaxis.set_major_locator(MaxNLocator(6) if narrow else LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _efficiencies(ax: Any, study: Study, colour: str, name: str) -> None:
    measured = [(case, study.efficiency(case)) for case in study.measured]
    points = [(c.ranks, *(100 * value for value in e)) for c, e in measured if e is not None]
    ax.axhline(100, color="0.6", linestyle=":", label=f"{name}ideal" if not name else None)
    _with_quartiles(ax, points, colour, f"{name}measured")
    guesses = [(case.ranks, study.predicted_efficiency(case)) for case in study.cases]
    _predicted(ax, [(n, 100 * e) for n, e in guesses if e is not None], colour, name)
    ax.set_ylim(bottom=0)
    ax.set_ylabel(f"{study.kind}-scaling efficiency (%)")


def _columns(points: Iterable[tuple[int, Any]], factor: float) -> tuple[list[int], list[float]]:
    rows = list(points)
    return [n for n, _ in rows], [factor * value for _, value in rows]


def _with_quartiles(ax: Any, points: Sequence[tuple[float, ...]], colour: str, label: str) -> None:
    """Draw medians with their quartiles, and a line through the best of each number of ranks."""
    if not points:
        return
    ranks, middle, low, high = zip(*points, strict=True)
    below = [m - a for m, a in zip(middle, low, strict=True)]
    above = [b - m for m, b in zip(middle, high, strict=True)]
    ax.errorbar(ranks, middle, (below, above), fmt="o", capsize=2, color=colour, label=label)


def _predicted(ax: Any, points: list[tuple[int, float]], colour: str, name: str) -> None:
    """Draw predictions as a line, where there is one for each number of ranks, else as crosses."""
    if points:
        single = len({n for n, _ in points}) == len(points)
        style = "--" if single else "x"
        ax.plot(*zip(*sorted(points), strict=True), style, color=colour, label=f"{name}predicted")


def _grids(ax: Any, points: list[tuple[Case, float]], study: Study) -> None:
    """Write grids beside their points where several have the same number of ranks."""
    if len({case.ranks for case in study.measured}) < len(study.measured):
        for case, value in points:
            ax.annotate(
                case.name, (case.ranks, value), (4, 3), textcoords="offset points", fontsize=5
            )
