"""The boundary of a block: its own inputs and its halos make every output, and nothing twice."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from distconv.geometry.halo import make_boundary, needs_halo
from distconv.geometry.index_maps import Window
from distconv.geometry.layout import default_cuts, rank_box
from distconv.geometry.topology import AXES, Topology

windows = st.builds(
    lambda k, s, d, p: Window(k, s, d, (p, p)),
    st.sampled_from([1, 2, 3, 5]),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(0, 4),
)
rows = st.lists(st.tuples(windows, st.integers(4, 20), st.integers(1, 4)), min_size=2, max_size=2)


@given(rows)
def test_every_tap_of_every_output_counts_once(rows: list) -> None:
    window, sizes, parts = (tuple(column) for column in zip(*rows, strict=True))
    made = tuple(w.output_size(n) for w, n in zip(window, sizes, strict=True))
    reached = needs_halo(window, sizes, parts)
    if min(made) < 1 or reached is None:
        return
    topology = Topology(tuple({"height": parts[0], "width": parts[1]}.get(a, 1) for a in AXES))
    shape, outputs = (1, 1, *sizes), (1, 1, *made)
    cuts = default_cuts(4, topology)
    cut = tuple(bool(axes) for axes in cuts[2:])
    found = False
    for rank in range(topology.size):
        own, out = (rank_box(s, cuts, topology, rank) for s in (shape, outputs))
        edge = make_boundary(topology, rank, shape, outputs, cuts, window)
        plan = edge.plan
        found |= bool(edge.slabs)
        counted: Counter[tuple[Any, ...]] = Counter()

        def operate(
            held: Any, padding: Any, outputs: Any, taps: Any, start: Any, counted: Any = counted
        ) -> None:
            """Count the inputs `held` that an operator uses, by output and tap."""
            for o in product(*(range(a, b) for a, b in outputs)):
                for t in product(*(range(a, b) for a, b in taps)):
                    at = tuple(
                        (i - a) * w.stride + (j - b) * w.dilation - p
                        for i, j, (a, _), (b, _), w, p in zip(
                            o, t, outputs, taps, window, padding, strict=True
                        )
                    )
                    if at in held:
                        counted[o, t, tuple(i + s for i, s in zip(at, start, strict=True))] += 1

        every = [(0, w.kernel) for w in window]
        whole = [(0, n) for n in out.shape[2:]]
        block = set(product(*(range(n) for n in own.shape[2:])))
        operate(block, edge.own.padding, whole, every, own.start[2:])
        # Where the buffer, and a dimension that is not cut, begin in the plane.
        origin = [
            b * w.stride - w.padding[0] if c else 0
            for b, w, c in zip(out.start[2:], window, cut, strict=True)
        ]
        for slab in edge.slabs:
            held = {
                at
                for part in slab.halo
                for at in product(*(range(s.start, s.stop) for s in part.place[2:]))
            }
            starts = [
                g + message.start - place.start + (inside.start)
                for g, message, place, inside in zip(
                    origin,
                    plan.receives[slab.halo[0].message].boxes[0][2:],
                    slab.halo[0].place[2:],
                    slab.halo[0].box[2:],
                    strict=True,
                )
            ]
            spans = [[(s.start, s.stop) for s in x[2:]] for x in (slab.outputs, slab.taps)]
            operate(held, slab.piece.padding, *spans, starts)
        expected = {
            (o, t, at)
            for o in product(*(range(n) for n in out.shape[2:]))
            for t in product(*(range(w.kernel) for w in window))
            for at in [
                tuple(
                    (i + a) * w.stride + j * w.dilation - w.padding[0]
                    for i, j, a, w in zip(o, t, out.start[2:], window, strict=True)
                )
            ]
            if all(0 <= i < n for i, n in zip(at, sizes, strict=True))
        }
        assert set(counted) == expected and set(counted.values()) <= {1}
    assert found == reached
