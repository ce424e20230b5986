"""SVG drawings for reports, which stretch with the page while their letters keep their size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from math import floor, log10
from typing import NamedTuple, TypeAlias

from distconv.geometry.topology import AXES, Topology
from distconv.tools.reports.document import COLOURS, legend, section


class Bar(NamedTuple):
    """A coloured stretch of time in a drawing of `lanes`; times are in seconds."""

    begin: float
    end: float
    colour: str
    title: str


Point: TypeAlias = tuple[float, float, float | None, float | None]
"""The x and y coordinates, and the lower and upper end of a whisker if there is one."""


class Curve(NamedTuple):
    """A named series of points in a `chart`, with the style in which it is drawn."""

    name: str
    points: Sequence[Point]
    colour: str
    line: str = ""
    """The style of the line through its points: `solid`, `dashed`, or none."""
    marks: bool = True


def _rect(x: float, width: float, colour: str, title: str, height: float) -> str:
    return (
        f'<rect class="edge" x="{x:.4g}%" width="{max(width, 0.15):.4g}%" height="{height:g}" '
        f'fill="{colour}"><title>{escape(title)}</title></rect>'
    )


def strip(colours: Sequence[str], titles: Sequence[str], heights: Sequence[float]) -> str:
    """Return an SVG row of coloured cells, one for each call of a layer, with columns below.

    Each cell has a colour and a title; the column below it has the height in `heights`.
    """
    width, most = 100 / max(len(colours), 1), max(heights, default=0.0) or 1.0
    cells = "".join(
        _rect(i * width, width, colour, title, 26)
        for i, (colour, title) in enumerate(zip(colours, titles, strict=True))
    )
    columns = "".join(
        f'<rect x="{i * width:.4g}%" y="32" width="{0.8 * width:.4g}%" '
        f'height="{34 * height / most:.4g}" fill="{COLOURS[-1]}"><title>{escape(title)}</title>'
        "</rect>"
        for i, (height, title) in enumerate(zip(heights, titles, strict=True))
        if height
    )
    tall = 68 if columns else 26
    return f'<svg height="{tall}" role="img" aria-label="layouts">{cells}{columns}</svg>'


def lanes(rows: Mapping[str, Sequence[Bar]], begin: float, end: float) -> str:
    """Return rows of bars over an axis from `begin` to `end` seconds, a row for each name."""
    length = end - begin or 1.0
    drawn = []
    for name, spans in rows.items():
        rects = "".join(
            _rect(100 * (s.begin - begin) / length, 100 * (s.end - s.begin) / length, *s[2:], 16)
            for s in _joined(spans, length / 1500)
        )
        drawn.append(
            f'<div class="lane"><span title="{escape(name)}">{escape(name)}</span>'
            f'<svg height="16" role="img" aria-label="{escape(name)}">'
            f'<rect class="track" width="100%" height="16"/>{rects}</svg></div>'
        )
    marks = []
    for mark in ticks(1e3 * begin, 1e3 * end, 6):
        place = 100 * (mark / 1e3 - begin) / length
        anchor = "start" if place < 5 else "end" if place > 95 else "middle"
        marks.append(
            f'<line class="axis" x1="{place:.4g}%" x2="{place:.4g}%" y1="0" y2="4"/>'
            f'<text class="quiet" x="{place:.4g}%" y="15" text-anchor="{anchor}">{mark:g}</text>'
        )
    drawn.append(f'<div class="lane"><span>ms</span><svg height="18">{"".join(marks)}</svg></div>')
    return "".join(drawn)


def _joined(spans: Iterable[Bar], least: float) -> Iterator[Bar]:
    """Yield bars in order of time; bars of one colour closer than `least` seconds are joined."""
    last: Bar | None = None
    for span in sorted(spans):
        if last is not None and span.colour == last.colour and span.begin - last.end < least:
            same = span.title == last.title or last.end - last.begin > span.end - span.begin
            title = last.title if same else span.title
            last = Bar(last.begin, max(last.end, span.end), last.colour, title)
            continue
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return at most about `count` round numbers from `low` to `high`, evenly spaced."""
    step = 10.0 ** floor(log10((high - low) / count)) if high > low else 1.0
    step *= next(f for f in (1, 2, 5, 10) if (high - low) / (step * f) <= count)
    first = -floor(-low / step)
    return [round(i * step, 12) for i in range(first, floor(high / step + 1e-9) + 1)]


def chart(
    curves: Sequence[Curve], x_marks: Mapping[float, str], y_marks: Mapping[float, str], title: str
) -> str:
    """Return curves over two axes with labels at the marks, all in the drawing's coordinates."""
    width, height, left, bottom = 380.0, 230.0, 58.0, 24.0
    xs = [*x_marks, *(p[0] for c in curves for p in c.points)]
    ys = [*y_marks, *(y for c in curves for p in c.points for y in p[1:] if y is not None)]
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x0) / (x1 - x0 or 1.0)
        up = (y - y0) / (y1 - y0 or 1.0)
        return left + across * (width - left - 12), (height - bottom) - up * (height - bottom - 12)

    parts = []
    for y, text in y_marks.items():
        level = at(x0, y)[1]
        parts.append(
            f'<line class="axis" x1="{left:g}" x2="{width - 6:g}" y1="{level:.4g}" '
            f'y2="{level:.4g}"/>'
            f'<text class="quiet" x="{left - 6:g}" y="{level + 4:.4g}" text-anchor="end">'
            f"{escape(text)}</text>"
        )
    for x, text in x_marks.items():
        parts.append(
            f'<text class="quiet" x="{at(x, y0)[0]:.4g}" y="{height - 6:g}" text-anchor="middle">'
            f"{escape(text)}</text>"
        )
    parts += [part for curve in curves for part in _curve(curve, at)]
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" style="max-width:36rem" role="img">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
        + legend({curve.name: curve.colour for curve in curves if curve.name})
    )


def _curve(curve: Curve, at: Callable[[float, float], tuple[float, float]]) -> Iterator[str]:
    if curve.line and len(curve.points) > 1:
        path = " ".join(f"{x:.5g},{y:.5g}" for x, y in (at(*p[:2]) for p in curve.points))
        dashes = ' stroke-dasharray="6 4"' if curve.line == "dashed" else ""
        yield f'<polyline class="curve" stroke="{curve.colour}"{dashes} points="{path}"/>'
    for x, y, low, high in curve.points if curve.marks else ():
        px, py = at(x, y)
        if low is not None and high is not None:
            yield (
                f'<line x1="{px:.5g}" x2="{px:.5g}" y1="{at(x, low)[1]:.5g}" '
                f'y2="{at(x, high)[1]:.5g}" stroke="{curve.colour}" stroke-width="1.5"/>'
            )
        radius = 3 if len(curve.points) < 60 else 1.6
        yield f'<circle cx="{px:.5g}" cy="{py:.5g}" r="{radius}" fill="{curve.colour}"/>'


MOST_NODES = 16
MOST_RANKS = 32
"""The most nodes of a drawing, and the most ranks drawn for a node or a replica."""


def grid_section(grid: Mapping[str, int], ranks_per_node: int | None) -> str:
    """Return a section that draws a grid's ranks by nodes, or by replicas; "" for one rank."""
    topology = Topology(tuple(int(grid.get(axis, 1)) for axis in AXES))
    if topology.size == 1:
        return ""
    note = "A colour for each replica. Letters and numbers are the place of a rank along the axes."
    cut = [axis for axis in AXES if axis != "sample" and topology.extent(axis) > 1]
    within = ranks_per_node or topology.size // topology.extent("sample")
    name, groups = "node" if ranks_per_node else "replica", -(-topology.size // within)
    # A row has the ranks along the last cut axis, where they are few.
    last = topology.extent(cut[-1]) if len(cut) > 1 else topology.size
    columns = last if last <= 5 else 4
    drawn = []
    for group in range(min(groups, MOST_NODES)):
        ranks = range(group * within, min((group + 1) * within, topology.size))
        cells = "".join(_rank(topology, rank, cut) for rank in ranks[:MOST_RANKS])
        more = f", {len(ranks) - MOST_RANKS} more ranks" if len(ranks) > MOST_RANKS else ""
        drawn.append(
            f'<figure><div style="grid-template-columns:repeat({min(len(ranks), columns)},3.6rem)">'
            f"{cells}</div><figcaption>{name} {group}{more}</figcaption></figure>"
        )
    rest = f'<p class="quiet">and {groups - MOST_NODES} more</p>' if groups > MOST_NODES else ""
    return section("The grid", f'<div class="nodes">{"".join(drawn)}</div>{rest}', note)


def _rank(topology: Topology, rank: int, cut: Sequence[str]) -> str:
    at = topology.coordinates(rank)
    axes = ("sample", *cut) if topology.extent("sample") > 1 else cut
    words = ", ".join(f"{axis} {at[axis]}" for axis in axes)
    short = " ".join(f"{axis[0]}{at[axis]}" for axis in cut)
    colour = COLOURS[at["sample"] % (len(COLOURS) - 1)]
    return (
        f'<span title="rank {rank}: {words}" style="background:{colour}">{rank}<br/>{short}</span>'
    )
