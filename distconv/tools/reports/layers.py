"""The reports of `explain` and `verify`: the layers of a module on a grid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, floor, log10

from distconv.planning.prediction import in_words
from distconv.planning.recording import LayerPlan
from distconv.planning.table import byte_size
from distconv.tools.explain import HEADING, Explanation, cells_of_layer, layout_in_words
from distconv.tools.reports.document import COLOURS, alert, legend, page, section, sortable
from distconv.tools.reports.drawing import Curve, chart, grid_section, strip
from distconv.tools.verify import HEADING as DIFFERENCES
from distconv.tools.verify import TensorComparison, Verification


def explain_page(plan: Explanation, grid: Mapping[str, int]) -> str:
    """Return the HTML page for a result of `explain`."""
    layers, serial = plan.layers, plan.serial_kept_bytes
    received = sum(layer.halo_bytes for layer in layers)
    moved = sum(layer.redistributed_bytes for layer in layers)
    numbers = [
        (byte_size(plan.kept_bytes), "kept for the backward pass on this rank"),
        *([] if serial is None else [(byte_size(serial), "kept by the serial program")]),
        (byte_size(plan.parameter_bytes), "parameters on this rank"),
        (byte_size(received), "received in halos, forward"),
        (byte_size(moved), "received in redistributions, forward"),
        (str(len(layers)), "calls of layers and functions"),
    ]
    rows = [HEADING, *map(cells_of_layer, layers)]
    sections = [
        alert(f"{layers[-1].name} is refused: {plan.refusal}") if plan.refusal else "",
        _layouts(layers),
        grid_section(grid, None),
        section("Every call", sortable(rows, {len(layers) - 1} if plan.refusal else ())),
    ]
    about = f"The forward pass on rank {plan.rank} of {plan.grid}, without running it."
    return page(f"{plan.module} on {in_words(grid, ', ')}", about, numbers, sections)


def _layouts(layers: Sequence[LayerPlan]) -> str:
    """Return a section that draws the layout of each layer, and the bytes that it receives."""
    names = [
        layout_in_words(x) or ("redistribution" if x.redistributions else "no tensor")
        for x in layers
    ]
    colours = dict(zip(dict.fromkeys(names), COLOURS * (len(layers) + 1), strict=False))
    titles = [
        f"{layer.name or 'between layers'} {layer.kind}: {name}"
        + (f", {'x'.join(map(str, layer.shape))}" if layer.shape else "")
        + (f", halos {byte_size(layer.halo_bytes)}" if layer.halo_bytes else "")
        + (f", moved {byte_size(layer.redistributed_bytes)}" if layer.redistributed_bytes else "")
        for layer, name in zip(layers, names, strict=True)
    ]
    received = [layer.halo_bytes + layer.redistributed_bytes for layer in layers]
    drawn = strip([colours[name] for name in names], titles, received)
    note = "From input to output, a cell for each call. Columns beneath: bytes received there."
    return section("Layouts along the network", drawn + legend(colours), note)


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
    marked = {i for i, row in enumerate(rows) if not row.ok}
    note = (
        "Each tensor in the order of the table: its difference from the serial one, and the "
        "difference of two serial runs whose inputs differ in their last place."
    )
    sections = [
        alert(found.verdict, good=found.ok),
        *(alert(f"note: {note}", good=True) for note in found.notes),
        section("Differences", _differences(rows, found.tolerance), note),
        grid_section(grid, None),
        section("Every tensor", sortable([DIFFERENCES, *(row.cells for row in rows)], marked)),
    ]
    about = "Outputs, buffers and gradients against the serial program, layer by layer."
    title = f"{found.module} on {in_words(grid, ', ')}: {'all agree' if found.ok else 'deviates'}"
    return page(title, about, numbers, sections)


def _differences(rows: Sequence[TensorComparison], tolerance: float) -> str:
    """Return a chart of differences on a logarithmic axis, with zero at its lower end."""
    sizes = [*(r.difference for r in rows), *(r.rounding for r in rows), tolerance]
    finite = [log10(size) for size in sizes if 0 < size < float("inf")] or [-16.0]
    low, high = floor(min(finite)), ceil(max(finite))

    def level(size: float) -> float:
        return min(max(log10(size), low), high) if size > 0 else float(low)

    def points(sizes: Iterable[float]) -> list[tuple[float, float, None, None]]:
        return [(i, level(size), None, None) for i, size in enumerate(sizes, 1)]

    ends = [(1, level(tolerance), None, None), (max(len(rows), 2), level(tolerance), None, None)]
    curves = [
        Curve("rounding alone", points(r.rounding for r in rows), COLOURS[-1]),
        Curve("difference", points(r.difference for r in rows), COLOURS[0]),
        Curve("tolerance", ends, COLOURS[1], "dashed", marks=False),
    ]
    step = max(1, -(-(high - low) // 6))
    marks = {float(n): f"1e{n}" for n in range(low, high + 1, step)}
    return chart(curves, {1.0: "1", float(max(len(rows), 2)): str(len(rows))}, marks, "differences")
