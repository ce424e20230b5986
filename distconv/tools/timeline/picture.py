"""A picture of a timeline: rows of every rank, and what is under way beneath them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distconv.data.durable import write_atomically
from distconv.tools.timeline.events import ROWS, Event
from distconv.tools.timeline.messages import KINDS
from distconv.tools.timeline.summary import spans, spans_under_way

_COLORS = dict(
    zip(
        (*ROWS, *KINDS),
        ("#4c72b0", "#c44e52", "#4c72b0", "#55a868", "#8172b3", "#ccb974", "#dd8452", "#937860"),
        strict=True,
    )
)


def draw(events: Sequence[Event], path: Path, begin: float, end: float) -> None:
    """Draw a timeline from `begin` to `end` milliseconds into a picture file.

    Raises
    ------
    ModuleNotFoundError
        Without matplotlib.
    """
    from matplotlib.figure import Figure

    timed = [e for e in events if "ts" in e]
    bars = []
    for rank in sorted({e["pid"] for e in events}):
        mine = [e for e in timed if e["pid"] == rank]
        for row in (ROWS[2], ROWS[0], ROWS[1]):
            bars.append((rank, row, spans(e for e in mine if e["cat"] == row)))
        for kind in KINDS:
            bars.append((rank, kind, spans_under_way(e for e in mine if e["cat"] == kind)))
    shown = []
    for rank, row, intervals in bars:
        cut = [(max(a / 1e3, begin), min(b / 1e3, end)) for a, b in intervals]
        inside = [(a, b - a) for a, b in cut if b > a]
        if inside:
            shown.append((f"rank {rank}: {row}", _COLORS[row], inside))
    figure = Figure(figsize=(9, 0.6 + 0.32 * max(1, len(shown))), layout="tight")
    axes = figure.subplots()
    for place, (_, color, inside) in enumerate(shown):
        axes.broken_barh(inside, (place - 0.4, 0.8), facecolors=color, edgecolors="white", lw=0.2)
    axes.set_yticks(range(len(shown)), [name for name, _, _ in shown])
    axes.set_xlim(begin, end)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    form = path.suffix.removeprefix(".") or "png"
    write_atomically(path, lambda file: figure.savefig(file, format=form, dpi=90))
