"""Pages for a browser, each in one file: headings, numbers, tables that sort, figures.

Every page is also well-formed XML, so that a test can parse it. Pages are readable on a phone, on
dark screens and on paper, and load no other files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, inf, log10
from typing import Any, NamedTuple

from distconv.geometry.topology import AXES, Topology
from distconv.planning.layer_layouts import LayoutPlan
from distconv.planning.machine import Machine
from distconv.planning.prediction import LAYER_HEADING, Prediction, in_words
from distconv.planning.recording import LayerPlan
from distconv.planning.scaling import Study
from distconv.planning.search import GRID_HEADING, GridPlan
from distconv.planning.table import (
    Cell,
    byte_size,
    filled,
    milliseconds,
    numeric,
    size_cell,
    text_of,
    time_cell,
)
from distconv.tools.explain import HEADING, Explanation, cells_of_layer, layout_in_words
from distconv.tools.reports.figures import COLOURS, Bar, Curve, Point, chart, lanes, strip
from distconv.tools.templates import render
from distconv.tools.timeline import KINDS, ROWS, Event, spans, times_of_ranks
from distconv.tools.verify import HEADING as DIFFERENCES
from distconv.tools.verify import TensorComparison, Verification
from distconv.tools.version import __version__


class Alert(NamedTuple):
    """A highlighted sentence: green if `good`, else red."""

    text: str
    good: bool = False


@dataclass
class Section:
    """A section of a page: a heading, a sentence `note` on how to read the section, and content."""

    title: str = ""
    note: str = ""
    alerts: Sequence[Alert] = ()
    figures: Sequence[str] = ()
    nodes: Sequence[Mapping[str, Any]] = ()
    """The ranks of a grid by nodes, from `grid_section`."""
    rows: Sequence[Sequence[Cell]] = ()
    """A table, headings first. Columns with a heading only are left out."""
    marked: Collection[int] = ()
    """The indices of highlighted rows, counted from 0 below the headings."""

    @property
    def table(self) -> dict[str, Any] | None:
        """Return the table in the form that the template expects; None without rows.

        Numbers outside the first column have bars, in proportion to the largest number in the
        column.
        """
        if not self.rows:
            return None
        kept, numbers = filled(self.rows), numeric(self.rows)
        head, *below = self.rows
        largest = {i: max(map(_value, (row[i] for row in below))) for i in numbers if i}

        def cell(row: Sequence[Cell], i: int) -> dict[str, Any]:
            value, most = _value(row[i]), largest.get(i, 0.0)
            bar = f"{100 * value / most:.3g}%" if value > 0 and 0 < most < inf else ""
            return {"text": text_of(row[i]), "number": i in numbers, "value": value, "bar": bar}

        return {
            "head": [{"text": text_of(head[i]), "number": i in numbers} for i in kept],
            "rows": [[cell(row, i) for i in kept] for row in below],
            "marked": self.marked,
        }


def _value(cell: Cell) -> float:
    """Return the number by which a cell is sorted; -1 for a cell that is a text."""
    return -1 if isinstance(cell, str) else cell[1]


def page(
    title: str, about: str, numbers: Sequence[tuple[str, str]], sections: Iterable[Section]
) -> str:
    """Return an HTML page: a sentence `about` it, numbers with labels, and sections."""
    given = {"title": title, "about": about, "numbers": numbers, "sections": list(sections)}
    return render("report.html.j2", **given, version=__version__)


MOST_NODES = 16
MOST_RANKS = 32
"""The largest number of nodes in a drawing, and of ranks drawn for a node or a replica."""


def grid_section(grid: Mapping[str, int], ranks_per_node: int | None) -> list[Section]:
    """Return a section that draws a grid's ranks by nodes, or by replicas; none for one rank."""
    topology = Topology(tuple(int(grid.get(axis, 1)) for axis in AXES))
    if topology.size == 1:
        return []
    note = "A colour for each replica. Letters and numbers are the place of a rank along the axes."
    cut = [axis for axis in AXES if axis != "sample" and topology.extent(axis) > 1]
    within = ranks_per_node or topology.size // topology.extent("sample")
    name, groups = "node" if ranks_per_node else "replica", -(-topology.size // within)
    # A row has the ranks along the last partitioned axis, if these are few.
    last = topology.extent(cut[-1]) if len(cut) > 1 else topology.size
    columns = last if last <= 5 else 4
    nodes = []
    for group in range(min(groups, MOST_NODES)):
        ranks = range(group * within, min((group + 1) * within, topology.size))
        more = f", {len(ranks) - MOST_RANKS} more ranks" if len(ranks) > MOST_RANKS else ""
        drawn = [_rank(topology, rank, cut) for rank in ranks[:MOST_RANKS]]
        caption = f"{name} {group}{more}"
        nodes.append({"caption": caption, "columns": min(len(ranks), columns), "ranks": drawn})
    if groups > MOST_NODES:
        note += f" {groups - MOST_NODES} more {name}s are not drawn."
    return [Section("The grid", note, nodes=nodes)]


def _rank(topology: Topology, rank: int, cut: Sequence[str]) -> dict[str, Any]:
    at = topology.coordinates(rank)
    axes = ("sample", *cut) if topology.extent("sample") > 1 else cut
    return {
        "number": rank,
        "words": ", ".join(f"{axis} {at[axis]}" for axis in axes),
        "short": " ".join(f"{axis[0]}{at[axis]}" for axis in cut),
        "colour": COLOURS[at["sample"] % (len(COLOURS) - 1)],
    }


# `explain` and `verify`: the layers of a module on a grid.


def explain_page(plan: Explanation, grid: Mapping[str, int]) -> str:
    """Return the HTML page for a result of `explain`."""
    layers, serial = plan.layers, plan.serial_kept_bytes
    numbers = [(byte_size(plan.kept_bytes), "kept for the backward pass on this rank")]
    if serial is not None:
        numbers.append((byte_size(serial), "kept by the serial program"))
    received = sum(layer.halo_bytes for layer in layers)
    moved = sum(layer.redistributed_bytes for layer in layers)
    numbers += [
        (byte_size(plan.parameter_bytes), "parameters on this rank"),
        (byte_size(received), "received in halos, forward"),
        (byte_size(moved), "received in redistributions, forward"),
        (str(len(layers)), "calls of layers and functions"),
    ]
    refused = plan.refusal is not None
    alerts = [Alert(f"{layers[-1].name} is unsupported: {plan.refusal}")] if refused else []
    rows = [HEADING, *map(cells_of_layer, layers)]
    sections = [
        Section(alerts=alerts),
        _layouts(layers),
        *grid_section(grid, None),
        Section("Every call", rows=rows, marked=[len(layers) - 1] if refused else []),
    ]
    about = f"The forward pass on rank {plan.rank} of {plan.grid}, without running it."
    return page(f"{plan.module} on {in_words(grid, ', ')}", about, numbers, sections)


def _layouts(layers: Sequence[LayerPlan]) -> Section:
    """Return a section that draws the layout of each layer, and the bytes that it receives."""
    names, titles, received = [], [], []
    for layer in layers:
        name = layout_in_words(layer) or (
            "redistribution" if layer.redistributions else "no tensor"
        )
        title = [f"{layer.name or 'between layers'} {layer.kind}: {name}"]
        if layer.shape:
            title.append("x".join(map(str, layer.shape)))
        if layer.halo_bytes:
            title.append(f"halos {byte_size(layer.halo_bytes)}")
        if layer.redistributed_bytes:
            title.append(f"moved {byte_size(layer.redistributed_bytes)}")
        names.append(name)
        titles.append(", ".join(title))
        received.append(layer.halo_bytes + layer.redistributed_bytes)
    note = "From input to output, a cell for each call. Columns below: bytes received in that call."
    return Section("Layouts along the network", note, figures=[strip(names, titles, received)])


def verify_page(found: Verification, grid: Mapping[str, int]) -> str:
    """Return the HTML page for a result of `verify`."""
    rows = found.rows
    largest = max((row.difference for row in rows), default=0.0)
    numbers = [
        (str(len(rows)), "tensors compared"),
        (str(sum(not row.ok for row in rows)), "that deviate"),
        (f"{largest:.1e}", "largest difference, relative"),
        (f"{found.tolerance:.1e}", "tolerance"),
    ]
    marked = [i for i, row in enumerate(rows) if not row.ok]
    note = (
        "Each tensor in the order of the table: its difference from the serial one, and the "
        "difference of two serial runs whose inputs differ in their last place."
    )
    notes = [Alert(f"note: {text}", good=True) for text in found.notes]
    table = [DIFFERENCES, *(row.cells for row in rows)]
    sections = [
        Section(alerts=[Alert(found.verdict, good=found.ok), *notes]),
        Section("Differences", note, figures=[_differences(rows, found.tolerance)]),
        *grid_section(grid, None),
        Section("Every tensor", rows=table, marked=marked),
    ]
    about = "Outputs, buffers and gradients against the serial program, layer by layer."
    title = f"{found.module} on {in_words(grid, ', ')}: {'all agree' if found.ok else 'deviates'}"
    return page(title, about, numbers, sections)


def _differences(rows: Sequence[TensorComparison], tolerance: float) -> str:
    """Return a chart of differences on a logarithmic axis, with zero at its lower end."""
    sizes = [*(r.difference for r in rows), *(r.rounding for r in rows), tolerance]
    finite = [log10(size) for size in sizes if 0 < size < inf] or [-16.0]
    low, high = 10.0 ** floor(min(finite)), 10.0 ** ceil(max(finite))
    last = max(len(rows), 2)

    def points(sizes: Iterable[float]) -> list[Point]:
        return [(i, min(max(size, low), high)) for i, size in enumerate(sizes, 1)]

    curves = [
        Curve("rounding alone", points(r.rounding for r in rows), COLOURS[-1], "o"),
        Curve("difference", points(r.difference for r in rows), COLOURS[0], "o"),
        Curve("tolerance", [(1, tolerance or low), (last, tolerance or low)], COLOURS[1], "--"),
    ]
    ends = {1.0: "1", float(last): str(len(rows))}
    return chart("Relative difference", curves, ends, "{:.0e}".format, logarithmic="y")


# `predict` and `plan`: a training step on one grid, or on all.

ACTIVITIES = {
    "compute": COLOURS[0],
    "host": COLOURS[3],
    "communication": COLOURS[4],
    "wait": COLOURS[1],
}
"""The colours of a rank's activities in a drawing of a predicted step."""

IN_MS = "Times are in milliseconds."


def prediction_page(found: Prediction, machine: Machine) -> str:
    """Return the HTML page for a result of `predict`."""
    about = f"A training step as predicted for {_machine(found)}."
    title = f"{found.module} on {in_words(found.grid, ', ')}"
    return page(title, about, _numbers_of_step(found), _step(found, machine))


def _machine(found: Prediction | GridPlan) -> str:
    return f"{found.machine}, with assumed numbers" if found.assumed else found.machine


def _numbers_of_step(found: Prediction) -> list[tuple[str, str]]:
    return [
        (milliseconds(found.seconds), "a step"),
        (milliseconds(found.seconds_per_sample), "a sample"),
        (byte_size(found.peak), "most memory of a rank"),
        (milliseconds(found.exposed), "waiting for messages"),
        (milliseconds(found.hidden), "of messages overlapped with computation"),
    ]


def plan_page(found: GridPlan, layers: LayoutPlan | None, machine: Machine) -> str:
    """Return the HTML page for a result of `plan`, and of `plan_layouts` if given."""
    about = f"All grids of {found.ranks} ranks on {_machine(found)}."
    refused = [i for i, candidate in enumerate(found.candidates) if candidate.refusal]
    rows = [GRID_HEADING, *(candidate.cells for candidate in found.candidates)]
    grids = Section("The grids", IN_MS, rows=rows, marked=refused)
    if not found.fitting:
        sections = [Section(alerts=[Alert(found.nothing_fits.partition("\n")[0])])]
        if found.ways_out:
            ways: list[Sequence[Cell]] = [
                (way.what, size_cell(way.peak), "fits" if way.fits else "does not fit")
                for way in found.ways_out
            ]
            sections.append(Section("What would", rows=[("what", "memory of a rank", ""), *ways]))
        return page(f"{found.module}: no grid fits", about, [], [*sections, grids])
    best = found.best
    words = in_words(best.grid, ", ")
    sections = [Section(alerts=[Alert(found.reason, good=True)]), grids]
    if layers is not None:
        said = Alert(str(layers).partition("\n")[0].rstrip(":"), good=True)
        own = [(name, repr(layout)) for name, layout in layers.layouts.items()]
        table = [("layer", "layout of its input"), *own] if own else []
        sections.append(Section("A layout for each layer", alerts=[said], rows=table))
    numbers = [(words, "the best grid"), *_numbers_of_step(best)]
    title = f"{found.module} on {found.ranks} ranks: {words}"
    return page(title, about, numbers, [*sections, *_step(best, machine)])


def _step(found: Prediction, machine: Machine) -> list[Section]:
    """Return sections for a predicted step: the critical path, memory, the grid, and layers."""
    path: dict[str, list[Bar]] = {}
    for s in found.critical_path:
        if s.what == "host" and machine.asynchronous:
            continue  # thousands of gaps between kernels
        what = f"{s.place.layer or 'between layers'}, {s.place.phase}, rank {s.rank}: {s.what}"
        span = Bar(s.start, s.stop, ACTIVITIES[s.what], what)
        path.setdefault(s.place.phase, []).append(span)
    memory = [(kind, size_cell(size)) for kind, size in found.memory.items() if size]
    note = (
        "The critical path: each interval waits for the one before. In gaps a GPU waits for Python."
    )
    step = lanes(path, 0.0, found.seconds, ACTIVITIES)
    return [
        Section("A step in time", note, figures=[step]),
        Section("Memory at its peak", rows=[("kind", "bytes"), *memory]),
        *grid_section(found.grid, machine.ranks_per_node),
        Section("Every layer", IN_MS, rows=[LAYER_HEADING, *(x.cells for x in found.layers)]),
    ]


# `scale`: a study of a step on increasing numbers of ranks.


def scale_page(study: Study) -> str:
    """Return the HTML page for a scaling study."""
    numbers = [(str(study.rounds), "rounds"), (str(len(study.cases)), "cases")]
    most = max(study.measured, key=lambda case: case.ranks, default=None)
    reached = None if most is None else study.efficiency(most)
    if most is not None and most.time is not None:
        numbers.append((milliseconds(most.time.median), f"a step on {most.ranks} ranks"))
    if most is not None and reached is not None:
        numbers.append((f"{reached.median:.0%}", f"efficiency on {most.ranks} ranks"))
    facts = [(name, value) for name, value in study.facts.items() if value]
    note = "Medians with quartiles. The line is the prediction, if there is one."
    sections = [
        Section("Time and efficiency", note, figures=_scaling(study)),
        Section("Cases", rows=study.rows()),
        Section("How it was measured", rows=[("fact", ""), *facts]),
    ]
    title = f"{study.kind} scaling of {study.module}"
    return page(title, "A training step on increasing numbers of ranks.", numbers, sections)


def _scaling(study: Study) -> list[str]:
    """Return charts of time and efficiency over ranks; ranks and time are logarithmic."""
    ranks = sorted({case.ranks for case in study.cases})
    times, shares, guesses, guessed = list[Point](), list[Point](), list[Point](), list[Point]()
    for case in sorted(study.cases, key=lambda case: case.ranks):
        time, share = case.time, study.efficiency(case)
        guess, reached = case.predicted, study.predicted_efficiency(case)
        if time is not None:
            times.append((case.ranks, *time))
        if share is not None:
            shares.append((case.ranks, *share))
        if guess is not None and reached is not None:
            guesses.append((case.ranks, guess))
            guessed.append((case.ranks, reached))
    ideal: list[Point] = [(n, t) for n in ranks if (t := study.ideal(n)) is not None]
    flat: list[Point] = [(n, 1.0) for n in (ranks[0], ranks[-1])]
    if not (times or guesses or ideal):
        return []
    ticks = {float(n): f"{n:,}" for n in ranks[:: -(-len(ranks) // 8)]}
    step = _curves(ideal, guesses, times)
    efficiency = _curves(flat, guessed, shares)
    return [
        chart("Time of a step", step, ticks, lambda seconds: f"{1e3 * seconds:g} ms"),
        chart("Efficiency", efficiency, ticks, "{:.0%}".format, logarithmic="x"),
    ]


def _curves(
    ideal: Sequence[Point], predicted: Sequence[Point], measured: Sequence[Point]
) -> list[Curve]:
    return [
        Curve("ideal", ideal, COLOURS[-1], "--"),
        Curve("predicted", predicted, COLOURS[1], "-"),
        Curve("measured", measured, COLOURS[0], "o"),
    ]


# `timeline`: the activities of every rank, and the messages in flight.

MOST_TIMELINES = 16
"""The largest number of ranks whose timelines are drawn."""

OF_ROWS = dict(zip((*ROWS, *KINDS), (COLOURS[i] for i in (0, 1, 0, 2, 5, 3, 6, 7)), strict=True))
"""The colours of the rows of a rank: activities, and kinds of messages."""


def timeline_page(events: Sequence[Event], name: str, begin: float, end: float) -> str:
    """Return the HTML page of a timeline called `name`, from `begin` to `end` in seconds."""
    rows = times_of_ranks(events)
    longest = max((row.seconds for row in rows), default=0.0)
    waits = sum(row.wait for row in rows) / max(sum(row.seconds for row in rows), 1e-12)
    under_way = sum(sum(row.under_way.values()) for row in rows)
    exposed = sum(sum(row.exposed.values()) for row in rows)
    numbers = [
        (str(len(rows)), "ranks"),
        (milliseconds(longest), "recorded"),
        (f"{waits:.0%}", "of this time waiting for other ranks"),
        (f"{1 - exposed / under_way:.0%}" if under_way else "none", "of messages overlapped"),
    ]
    times: list[Sequence[Cell]] = [("rank", "recorded, ms", "computes", "waits")]
    kinds: list[Sequence[Cell]] = [
        ("rank", "messages", "received", "in flight, ms", "waited for, ms", "overlapped")
    ]
    for row in rows:
        rank = str(row.rank), row.rank
        times.append((rank, *map(time_cell, (row.seconds, row.compute, row.wait))))
        for kind, length in row.under_way.items():
            waited = row.exposed[kind]
            hidden = (length - waited) / length if length else 0.0
            share: Cell = (f"{hidden:.0%}", hidden) if length else ""
            received = size_cell(row.bytes[kind])
            kinds.append((rank, kind, received, time_cell(length), time_cell(waited), share))
    sections = [
        Section("Ranks", rows=times),
        *(
            Section(f"Rank {row.rank}", figures=[_lanes_of(events, row.rank, begin, end)])
            for row in rows[:MOST_TIMELINES]
        ),
        Section("Messages", rows=kinds),
    ]
    about = "The work of every rank on a common clock, and the messages in flight."
    return page(f"Timeline {name}", about, numbers, sections)


def _lanes_of(events: Sequence[Event], rank: int, begin: float, end: float) -> str:
    mine = [event for event in events if event["pid"] == rank]
    rows: dict[str, list[Bar]] = {}
    for row in ("device", "compute", "wait", *KINDS):
        bars = [
            Bar(max(a / 1e6, begin), min(b / 1e6, end), OF_ROWS[row], title)
            for a, b, title in spans(mine, row)
            if b / 1e6 > begin and a / 1e6 < end
        ]
        if bars:
            rows[row] = bars
    return lanes(rows, begin, end, {})
