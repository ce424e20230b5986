"""Figures of reports, drawn by matplotlib as SVG, to be embedded in a page.

Marks have titles, which browsers show under the pointer. matplotlib writes a title as the id of an
SVG group, from which `_svg` makes an element `<title>`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#4477aa", "#dd4f63", "#228833", "#b08c00", "#2a93b5", "#aa3377", "#d9662b", "#777f88")
"""Colours that all readers can distinguish, on light and dark backgrounds (after Paul Tol)."""

WIDE, NARROW = 12.0, 6.0
"""Widths of figures in inches."""

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "distconv",
    "axes.edgecolor": "0.6",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "xtick.color": "0.6",
    "ytick.color": "0.6",
}
_WITHOUT_DATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def has_matplotlib() -> bool:
    """Return whether matplotlib is installed, without importing it."""
    return find_spec("matplotlib") is not None


def _svg(draw: Callable[[Axes], object], width: float, height: float) -> Markup:
    """Return a figure as SVG, drawn by `draw` on the figure's axes. Sizes are in inches."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    file = BytesIO()
    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure.subplots())
        figure.savefig(file, format="svg", transparent=True, metadata=_WITHOUT_DATA)
    drawn = file.getvalue().decode()
    drawn = re.sub(r'<g id="title:([^"]*)">', r"<g><title>\1</title>", drawn[drawn.index("<svg") :])
    # Names such as "axes_1", which nothing refers to, would be in every figure of a page.
    return Markup(re.sub(r' id="[\w.]+_\d+"', "", drawn))


class Bar(NamedTuple):
    """A coloured interval of time in a figure of `lanes`; times are in seconds."""

    begin: float
    end: float
    colour: str
    title: str


def lanes(
    rows: Mapping[str, Sequence[Bar]], begin: float, end: float, colours: Mapping[str, str]
) -> Markup:
    """Return rows of bars over an axis from `begin` to `end` seconds, a row for each name.

    `colours` has the entries of the legend, by name.
    """

    def draw(axes: Axes) -> None:
        for place, spans in enumerate(rows.values()):
            bars = list(_joined(spans, (end - begin) / 1500))
            lefts = [1e3 * bar.begin for bar in bars]
            lengths = [1e3 * (bar.end - bar.begin) for bar in bars]
            colour = [bar.colour for bar in bars]
            drawn = axes.barh([place] * len(bars), lengths, 0.8, lefts, color=colour)
            # An edge shows bars that are shorter than a pixel.
            for patch, bar in zip(drawn, bars, strict=True):
                patch.set(gid=f"title:{bar.title}", edgecolor=bar.colour, linewidth=0.4)
        axes.set_yticks(range(len(rows)), [name[:40] for name in rows])
        axes.invert_yaxis()
        axes.set_xlim(1e3 * begin, 1e3 * end)
        axes.set_xlabel("ms")
        _legend(axes, colours)

    return _svg(draw, WIDE, 0.7 + 0.22 * max(len(rows), 1) + (0.25 if colours else 0.0))


def _joined(spans: Iterable[Bar], least: float) -> Iterator[Bar]:
    """Yield bars in order of time; bars of one colour closer than `least` seconds are joined."""
    last: Bar | None = None
    for span in sorted(spans):
        if last is not None and span.colour == last.colour and span.begin - last.end < least:
            longer = max(last, span, key=lambda bar: bar.end - bar.begin)
            last = Bar(last.begin, max(last.end, span.end), last.colour, longer.title)
            continue
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last


def _legend(axes: Axes, colours: Mapping[str, str]) -> None:
    """Draw a legend of names with their colours above the axes."""
    from matplotlib.patches import Patch

    if colours:
        handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
        axes.legend(handles=handles, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))


def strip(names: Sequence[str], titles: Sequence[str], heights: Sequence[float]) -> Markup:
    """Return a row of cells, one for each call of a layer, with columns below.

    Cells of one name have one colour. The length of the column below a cell is proportional to the
    cell's number in `heights`. `titles` are shown under the pointer.
    """
    known = dict.fromkeys(names)
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(known)}
    most = max(heights, default=0.0) or 1.0

    def draw(axes: Axes) -> None:
        cells = axes.bar(range(len(names)), 0.7, 0.95, color=[colours[name] for name in names])
        columns = axes.bar(range(len(names)), [-h / most for h in heights], color=COLOURS[-1])
        for drawn in (cells, columns):
            for patch, title in zip(drawn, titles, strict=True):
                patch.set_gid(f"title:{title}")
        axes.set_axis_off()
        axes.margins(x=0)
        _legend(axes, colours)

    return _svg(draw, WIDE, 1.1 + 0.2 * -(-len(known) // 4))


Point: TypeAlias = tuple[float, float] | tuple[float, float, float, float]
"""The x and y coordinates of a point, and the ends of its whisker if it has one."""


class Curve(NamedTuple):
    """A named series of points in a `chart`, with a style as matplotlib spells it: "o", "--"."""

    name: str
    points: Sequence[Point]
    colour: str
    style: str


def chart(
    title: str,
    curves: Iterable[Curve],
    x_ticks: Mapping[float, str],
    text: Callable[[float], str],
    logarithmic: str = "xy",
) -> Markup:
    """Return curves over two axes.

    Parameters
    ----------
    title: the title of the figure.
    curves: the curves; curves without points are left out.
    x_ticks: the ticks of the x axis, with their texts.
    text: returns the text of a tick of the y axis.
    logarithmic: the axes with a logarithmic scale: "xy", "x" or "y".
    """

    from matplotlib.ticker import LogLocator

    shown = [curve for curve in curves if curve.points]

    def draw(axes: Axes) -> None:
        for name, points, colour, style in shown:
            x, y, *ends = zip(*points, strict=True)
            size = 4 if len(points) < 60 else 2
            axes.plot(x, y, style, color=colour, label=name, markersize=size)
            if ends:
                axes.vlines(x, *ends, color=colour)
        axes.set_title(title)
        if "x" in logarithmic:
            axes.set_xscale("log")
        if "y" in logarithmic:
            heights = [y for curve in shown for _, *ys in curve.points for y in ys]
            low, high = min(heights), max(heights)
            axes.set_yscale("log")
            axes.set_ylim(low / 2, 2 * high)
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
        else:
            axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, place: text(value))
        axes.set_xticks(list(x_ticks), list(x_ticks.values()))
        axes.minorticks_off()
        axes.grid(axis="y")
        axes.legend()

    return _svg(draw, NARROW, 3.6)
