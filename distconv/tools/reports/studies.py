"""The report of `scale`: a study of a step on more and more ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10

from distconv.planning.scaling import Study
from distconv.planning.table import milliseconds
from distconv.tools.reports.document import COLOURS, charts, page, section, sortable
from distconv.tools.reports.drawing import Curve, Point, chart


def scale_page(study: Study) -> str:
    """Return the HTML page for a scaling study."""
    numbers = [(str(study.rounds), "rounds"), (str(len(study.cases)), "cases")]
    most = max(study.measured, key=lambda case: case.ranks, default=None)
    reached = None if most is None else study.efficiency(most)
    if most is not None and most.time is not None:
        numbers.append((milliseconds(most.time.median), f"a step on {most.ranks} ranks"))
    if most is not None and reached is not None:
        numbers.append((f"{reached.median:.0%}", f"efficiency on {most.ranks} ranks"))
    facts = sortable(
        [("fact", ""), *((name, value) for name, value in study.facts.items() if value)]
    )
    note = "Medians with quartiles; the line between dots is the prediction, where there is one."
    sections = [
        section("Time and efficiency", charts(_scaling(study)), note),
        section("Cases", sortable(study.rows())),
        section("How it was measured", facts),
    ]
    title = f"{study.kind} scaling of {study.module}"
    return page(title, "A training step on more and more ranks.", numbers, sections)


def _scaling(study: Study) -> dict[str, str]:
    """Return charts of time and efficiency over ranks, by title; ranks and time are logarithmic."""
    ranks = sorted({case.ranks for case in study.cases})
    places = {log10(n): f"{n:,}" for n in ranks[:: -(-len(ranks) // 8)]}
    times, shares, guesses, guessed = list[Point](), list[Point](), list[Point](), list[Point]()
    for case in sorted(study.cases, key=lambda case: case.ranks):
        x, time, share = log10(case.ranks), case.time, study.efficiency(case)
        if time is not None:
            times.append((x, log10(time.median), log10(time.low), log10(time.high)))
        if share is not None:
            shares.append((x, share.median, share.low, share.high))
        guess, reached = case.predicted, study.predicted_efficiency(case)
        if guess is not None and reached is not None:
            guesses.append((x, log10(guess), None, None))
            guessed.append((x, reached, None, None))
    ideal = [(log10(n), log10(t), None, None) for n in ranks if (t := study.ideal(n)) is not None]
    flat: list[Point] = [(log10(n), 1.0, None, None) for n in (ranks[0], ranks[-1])]
    found = [p[1] for p in (*times, *guesses, *ideal)]
    if not found:
        return {}
    decades = range(floor(min(found)), ceil(max(found)) + 1)
    values = [f * 10.0**n for n in decades for f in (1, 2, 5)]
    near = [v for v in values if min(found) - 0.3 <= log10(v) <= max(found) + 0.3]
    marks = {log10(v): f"{1e3 * v:g} ms" for v in near}
    top = max([1.0, *(p[1] for p in (*shares, *guessed))])
    percents = {n / 100: f"{n}%" for n in range(0, ceil(100 * top) + 1, 25)}
    return {
        "Time of a step": chart(_curves(ideal, guesses, times), places, marks, "time"),
        "Efficiency": chart(_curves(flat, guessed, shares), places, percents, "efficiency"),
    }


def _curves(
    ideal: Sequence[Point], predicted: Sequence[Point], measured: Sequence[Point]
) -> list[Curve]:
    """Return an ideal, a predicted and a measured curve, without those that have no points."""
    curves = [
        Curve("ideal", ideal, COLOURS[-1], "dashed", marks=False),
        Curve("predicted", predicted, COLOURS[1], "solid", marks=False),
        Curve("measured", measured, COLOURS[0]),
    ]
    return [curve for curve in curves if curve.points]
