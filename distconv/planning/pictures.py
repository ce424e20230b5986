"""Pictures of scaling studies for papers: time and efficiency."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distconv.planning.scaling import STRONG, Study

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

_Points = Iterable[tuple[int, Any]]


def draw_studies(
    studies: Sequence[tuple[str, Study]], path: Path, kind: str = "png"
) -> tuple[Path, Path]:
    """Draw the times and the efficiencies of studies of one kind, and return the two files.

    Parameters
    ----------
    studies: with the name of each, which the legend tells where there are several.
    path: the files are `path` without its ending, and `.time.png`, `.efficiency.png`.
    kind: a format that matplotlib can write: png, pdf or svg.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    files = []
    for what, fill in (("time", _times), ("efficiency", _efficiencies)):
        with rc_context(STYLE):
            figure = Figure(figsize=SIZE, layout="constrained")
            ax = figure.subplots()
            for colour, (name, study) in zip(cycle(COLOURS), studies, strict=False):
                fill(ax, study, colour, f"{name}: " if len(studies) > 1 else "")
            axis_of_ranks(ax, sorted({c.ranks for _, study in studies for c in study.cases}))
            ax.set_title(f"{studies[0][1].kind} scaling of {studies[0][1].module}")
            ax.legend()
            files.append(path.with_suffix(f".{what}.{kind}"))
            figure.savefig(files[-1])
    return files[0], files[1]


def axis_of_ranks(ax: Axes, ranks: Sequence[int]) -> None:
    """Let the horizontal axis be that of ranks, with a mark for each number, as far as they fit."""
    ax.set_xscale("log", base=2)
    step = -(-len(ranks) // 12)
    ax.set_xticks(ranks[::step], [f"{n:,}" for n in ranks[::step]])
    ax.minorticks_off()
    ax.set_xlabel("ranks")


def _times(ax: Any, study: Study, colour: str, name: str) -> None:
    ideal = [(n, study.ideal(n)) for n in sorted({case.ranks for case in study.cases})]
    points = [(n, 1e3 * seconds) for n, seconds in ideal if seconds is not None]
    if points:
        ax.plot(*zip(*points, strict=True), color="0.6", linestyle=":", label=f"{name}ideal")
    measured = [(case, case.time) for case in study.measured]
    _with_quartiles(ax, [(c.ranks, t) for c, t in measured], 1e3, colour, name)
    _predicted(ax, [(c.ranks, c.predicted) for c in study.cases], 1e3, colour, name)
    if len({case.ranks for case in study.measured}) < len(study.measured):
        for case, time in measured:  # several have the same number of ranks
            place = (case.ranks, 1e3 * time.median) if time else (case.ranks, 0.0)
            ax.annotate(case.name, place, (4, 3), textcoords="offset points", fontsize=5)
    if study.kind == STRONG:
        axis_of_times(ax)
    else:
        ax.set_ylim(bottom=0)
    ax.set_ylabel("time of a training step (ms)")


def axis_of_times(ax: Any) -> None:
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
    ax.axhline(100, color="0.6", linestyle=":", label=None if name else "ideal")
    measured = [(case.ranks, study.efficiency(case)) for case in study.measured]
    _with_quartiles(ax, measured, 100, colour, name)
    guesses = [(case.ranks, study.predicted_efficiency(case)) for case in study.cases]
    _predicted(ax, guesses, 100, colour, name)
    ax.set_ylim(bottom=0)
    ax.set_ylabel(f"{study.kind}-scaling efficiency (%)")


def _with_quartiles(ax: Any, points: _Points, factor: float, colour: str, name: str) -> None:
    """Draw medians with their quartiles."""
    found = [(n, factor * s.median, factor * s.low, factor * s.high) for n, s in points if s]
    if found:
        ranks, middle, low, high = zip(*found, strict=True)
        below = [m - a for m, a in zip(middle, low, strict=True)]
        above = [b - m for m, b in zip(middle, high, strict=True)]
        style: Any = {"fmt": "o", "capsize": 2, "color": colour, "label": f"{name}measured"}
        ax.errorbar(ranks, middle, (below, above), **style)


def _predicted(ax: Any, points: _Points, factor: float, colour: str, name: str) -> None:
    """Draw predictions as a line, where there is one for each number of ranks, else as crosses."""
    found = sorted((n, factor * value) for n, value in points if value is not None)
    if found:
        style = "--" if len({n for n, _ in found}) == len(found) else "x"
        ax.plot(*zip(*found, strict=True), style, color=colour, label=f"{name}predicted")
