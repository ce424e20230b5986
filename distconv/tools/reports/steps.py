"""The pages of `predict` and `plan`: a training step on one grid, or on all."""

from __future__ import annotations

from distconv.planning.layer_layouts import LayoutPlan
from distconv.planning.machine import Machine
from distconv.planning.prediction import LayerTime, Prediction, in_words
from distconv.planning.search import Candidate, GridPlan
from distconv.planning.table import byte_size
from distconv.tools.reports.document import (
    COLOURS,
    Cell,
    alert,
    charts,
    legend,
    milliseconds,
    page,
    section,
    size_cell,
    table,
    time_cell,
)
from distconv.tools.reports.drawing import Bar, Span, bars, lanes
from distconv.tools.reports.nodes import grid_section

ACTIVITIES = {"compute": 0, "host": 3, "communication": 4, "wait": 1}
"""What a rank does in a predicted step, with the number of its colour."""

IDLE = "the device waits for Python"

TIMES = {"forward": COLOURS[0], "backward": COLOURS[4], "host": COLOURS[3], "exposed": COLOURS[1]}
"""The times of a layer, with their colours."""


def prediction_page(found: Prediction, machine: Machine) -> str:
    """Return the page of a predicted step."""
    sections = _step(found, machine)
    about = f"A training step as predicted for {_machine(found)}."
    title = f"{found.module} on {in_words(found.grid, ', ')}"
    return page(title, about, _numbers(found), sections)


def _machine(found: Prediction | GridPlan) -> str:
    return f"{found.machine}{', whose numbers are assumed' if found.assumed else ''}"


def _numbers(found: Prediction) -> list[tuple[str, str]]:
    return [
        (f"{milliseconds(found.seconds)} ms", "a step"),
        (f"{milliseconds(found.seconds_per_sample)} ms", "a sample"),
        (byte_size(found.peak), "most memory of a rank"),
        (f"{milliseconds(found.exposed)} ms", "waiting for messages"),
        (f"{milliseconds(found.hidden)} ms", "of messages behind computation"),
    ]


def plan_page(found: GridPlan, layers: LayoutPlan | None, machine: Machine) -> str:
    """Return the page of the grids of a number of ranks, with the step on the best one."""
    about = f"All grids of {found.ranks} ranks on {_machine(found)}."
    if not found.fitting:
        rows: list[list[Cell]] = [
            [way.what, size_cell(way.peak), "fits" if way.fits else "does not fit"]
            for way in found.ways_out
        ]
        ways = section("What would", table(("what", "memory of a rank", ""), rows)) if rows else ""
        sections = [alert(found.nothing_fits.partition("\n")[0]), ways, _grids(found)]
        return page(f"{found.module}: no grid fits", about, [], sections)
    best = found.best
    sections = [alert(found.reason, good=True), _grids(found), _own_layouts(layers)]
    sections += _step(best, machine)
    numbers = [(in_words(best.grid, ", "), "the best grid"), *_numbers(best)]
    return page(
        f"{found.module} on {found.ranks} ranks: {in_words(best.grid, ', ')}",
        about,
        numbers,
        sections,
    )


def _grids(found: GridPlan) -> str:
    """Return all grids as bars and as a table."""
    colours = {"compute": COLOURS[0], "host": COLOURS[3], "exposed": COLOURS[1], IDLE: COLOURS[-1]}
    times, memory = [], []
    for p in found.fitting:
        share = {"compute": p.compute, "host": p.host, "exposed": p.exposed}
        share[IDLE] = max(p.seconds - sum(share.values()), 0.0)
        parts = [
            (s / max(p.samples, 1), colours[what], f"{what}: {milliseconds(s)} ms a step")
            for what, s in share.items()
        ]
        times.append(Bar(in_words(p.grid), parts, f"{milliseconds(p.seconds_per_sample)} ms"))
        held = [(p.peak, COLOURS[2], byte_size(p.peak))]
        memory.append(Bar(in_words(p.grid), held, byte_size(p.peak)))
    shown = {"Time of a sample": bars(times) + legend(colours), "Memory of a rank": bars(memory)}
    drawn = charts(shown) if times else ""
    headings = ("grid", "a sample, ms", "a step, ms", "compute", "host", "exposed", "memory", "")
    rows = [_candidate(c) for c in found.candidates]
    marked = {i for i, c in enumerate(found.candidates) if c.refusal}
    return section("The grids", drawn + table(headings, rows, marked))


def _candidate(c: Candidate) -> list[Cell]:
    p = c.prediction
    if p is None:
        return [in_words(c.grid), *[""] * 6, c.refusal or ""]
    times = p.seconds_per_sample, p.seconds, p.compute, p.host, p.exposed
    return [in_words(c.grid), *map(time_cell, times), size_cell(p.peak), c.refusal or ""]


def _own_layouts(layers: LayoutPlan | None) -> str:
    """Return the layouts of layers that gain by one of their own."""
    if layers is None:
        return ""
    rows = [[name, repr(layout)] for name, layout in layers.layouts.items()]
    said = str(layers).partition("\n")[0].rstrip(":")
    body = alert(said, good=True) + (table(("layer", "layout of its input"), rows) if rows else "")
    return section("A layout for each layer", body)


def _step(found: Prediction, machine: Machine) -> list[str]:
    """Return the parts of a page that show a predicted step."""
    colours = {name: COLOURS[number] for name, number in ACTIVITIES.items()}
    rows: dict[str, list[Span]] = {}
    for s in found.critical_path:
        what = f"{s.place.layer or 'between layers'}, {s.place.phase}, rank {s.rank}: {s.what}"
        span = Span(s.start, s.stop, colours.get(s.what, COLOURS[-1]), what)
        rows.setdefault(s.place.phase, []).append(span)
    times = [_time_of(layer) for layer in found.layers]
    kept = [
        Bar(
            f"{x.name} {x.kind}".strip(),
            [(x.kept, COLOURS[2], byte_size(x.kept))],
            byte_size(x.kept),
        )
        for x in found.layers
    ]
    memory = [
        Bar(kind, [(n, COLOURS[2], byte_size(n))], byte_size(n)) for kind, n in found.memory.items()
    ]
    shown = {"Time": bars(times) + legend(TIMES), "Kept for the backward pass": bars(kept)}
    headings = ("layer", "type", "local output", *_TIMES_IN_WORDS, "kept")
    note = (
        "The critical path: each stretch of time has been waited for by the next. In gaps the "
        "device waits for Python."
    )
    return [
        section("A step in time", lanes(rows, 0.0, found.seconds) + legend(colours), note),
        section("Layer by layer", charts(shown)),
        section("Memory at its peak", bars(memory)),
        grid_section(found.grid, machine.ranks_per_node),
        section("Every layer", table(headings, [_layer_row(layer) for layer in found.layers])),
    ]


_TIMES_IN_WORDS = ("forward, ms", "backward, ms", "host, ms", "exposed, ms", "hidden, ms")


def _time_of(layer: LayerTime) -> Bar:
    amounts = {what: getattr(layer, what) for what in TIMES}
    parts = [(s, TIMES[what], f"{what}: {milliseconds(s)} ms") for what, s in amounts.items()]
    return Bar(f"{layer.name} {layer.kind}".strip(), parts, f"{milliseconds(layer.seconds)} ms")


def _layer_row(layer: LayerTime) -> list[Cell]:
    times = layer.forward, layer.backward, layer.host, layer.exposed, layer.hidden
    shape = "" if layer.shape is None else "x".join(map(str, layer.shape))
    return [layer.name, layer.kind, shape, *map(time_cell, times), size_cell(layer.kept)]
