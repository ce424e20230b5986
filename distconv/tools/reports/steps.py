"""The reports of `predict` and `plan`: a training step on one grid, or on all."""

from __future__ import annotations

from distconv.planning.layer_layouts import LayoutPlan
from distconv.planning.machine import Machine
from distconv.planning.prediction import LAYER_HEADING, Prediction, in_words
from distconv.planning.search import GRID_HEADING, GridPlan
from distconv.planning.table import byte_size, milliseconds, size_cell
from distconv.tools.reports.document import COLOURS, alert, legend, page, section, sortable
from distconv.tools.reports.drawing import Bar, grid_section, lanes

ACTIVITIES = {
    "compute": COLOURS[0],
    "host": COLOURS[3],
    "communication": COLOURS[4],
    "wait": COLOURS[1],
}
"""The colours of a rank's activities in a predicted step."""

IN_MS = "Times are in milliseconds."


def prediction_page(found: Prediction, machine: Machine) -> str:
    """Return the HTML page for a result of `predict`."""
    about = f"A training step as predicted for {_machine(found)}."
    title = f"{found.module} on {in_words(found.grid, ', ')}"
    return page(title, about, _numbers(found), _step(found, machine))


def _machine(found: Prediction | GridPlan) -> str:
    return f"{found.machine}{', whose numbers are assumed' if found.assumed else ''}"


def _numbers(found: Prediction) -> list[tuple[str, str]]:
    return [
        (milliseconds(found.seconds), "a step"),
        (milliseconds(found.seconds_per_sample), "a sample"),
        (byte_size(found.peak), "most memory of a rank"),
        (milliseconds(found.exposed), "waiting for messages"),
        (milliseconds(found.hidden), "of messages behind computation"),
    ]


def plan_page(found: GridPlan, layers: LayoutPlan | None, machine: Machine) -> str:
    """Return the HTML page for a result of `plan`, and of `plan_layouts` if given."""
    about = f"All grids of {found.ranks} ranks on {_machine(found)}."
    if not found.fitting:
        fits = "does not fit", "fits"
        ways = [[way.what, size_cell(way.peak), fits[way.fits]] for way in found.ways_out]
        would = section("What would", sortable([("what", "memory of a rank", ""), *ways]))
        sections = [alert(found.nothing_fits.partition("\n")[0]), would * bool(ways), _grids(found)]
        return page(f"{found.module}: no grid fits", about, [], sections)
    best = found.best
    words = in_words(best.grid, ", ")
    sections = [alert(found.reason, good=True), _grids(found), _own_layouts(layers)]
    sections += _step(best, machine)
    numbers = [(words, "the best grid"), *_numbers(best)]
    return page(f"{found.module} on {found.ranks} ranks: {words}", about, numbers, sections)


def _grids(found: GridPlan) -> str:
    marked = {i for i, c in enumerate(found.candidates) if c.refusal}
    cells = sortable([GRID_HEADING, *(c.cells for c in found.candidates)], marked)
    return section("The grids", cells, IN_MS)


def _own_layouts(layers: LayoutPlan | None) -> str:
    """Return the section for a result of `plan_layouts`; "" for None."""
    if layers is None:
        return ""
    rows = [(name, repr(layout)) for name, layout in layers.layouts.items()]
    said = alert(str(layers).partition("\n")[0].rstrip(":"), good=True)
    own = sortable([("layer", "layout of its input"), *rows]) if rows else ""
    return section("A layout for each layer", said + own)


def _step(found: Prediction, machine: Machine) -> list[str]:
    """Return sections for a predicted step: the critical path, memory, the grid, and layers."""
    path: dict[str, list[Bar]] = {}
    for s in found.critical_path:
        what = f"{s.place.layer or 'between layers'}, {s.place.phase}, rank {s.rank}: {s.what}"
        span = Bar(s.start, s.stop, ACTIVITIES[s.what], what)
        path.setdefault(s.place.phase, []).append(span)
    memory = [(kind, size_cell(size)) for kind, size in found.memory.items() if size]
    note = (
        "The critical path: each stretch of time has been waited for by the next. In gaps the "
        "device waits for Python."
    )
    step = lanes(path, 0.0, found.seconds) + legend(ACTIVITIES)
    return [
        section("A step in time", step, note),
        section("Memory at its peak", sortable([("kind", "bytes"), *memory])),
        grid_section(found.grid, machine.ranks_per_node),
        section("Every layer", sortable([LAYER_HEADING, *(x.cells for x in found.layers)]), IN_MS),
    ]
