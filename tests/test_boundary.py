"""The boundary of a block: what is computed before halos arrive is right, the rest is in pieces."""

from __future__ import annotations

from itertools import product
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from distconv.boundary import boundary, reaches
from distconv.layout import default_cuts, rank_box
from distconv.plan import make_plan
from distconv.topology import AXES, Topology
from distconv.window import Same, Window

windows = st.builds(
    lambda k, s, d, p: Window(k, s, d, (p, p)),
    st.sampled_from([1, 2, 3, 5]),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(0, 4),
)


@given(st.lists(st.tuples(windows, st.integers(4, 24), st.integers(1, 4)), min_size=2, max_size=2))
def test_every_output_is_computed_once_from_inputs_that_are_there(rows: list) -> None:
    window, sizes, parts = (tuple(column) for column in zip(*rows, strict=True))
    made = tuple(w.output_size(n) for w, n in zip(window, sizes, strict=True))
    if min(made) < 1 or reaches(window, sizes, parts) is None:
        return
    topology = Topology(tuple({"height": parts[0], "width": parts[1]}.get(a, 1) for a in AXES))
    shape, outputs = (1, 2, *sizes), (1, 3, *made)
    cuts = default_cuts(4, topology)
    cut = tuple(bool(axes) for axes in cuts[2:])
    needs = tuple(w if c else Same() for w, c in zip(window, cut, strict=True))
    found = False
    for rank in range(topology.size):
        plan = make_plan(topology, rank, shape, cuts, cuts, (Same(), Same(), *needs))
        own, out = (rank_box(s, cuts, topology, rank) for s in (shape, outputs))
        spans = [tuple(zip(b.start[2:], b.stop[2:], strict=True)) for b in (own, out)]
        edge = boundary(plan, window, sizes, *spans, cut)
        left = set(product(*(range(n) for n in out.shape[2:])))
        for piece in edge.pieces:
            covered = set(product(*(range(s.start, s.stop) for s in piece.outputs[2:])))
            assert covered <= left, "an output is computed twice"
            left -= covered
            assert piece.halo, "a piece that needs no halo"
            found = True
            # All inputs of the plane that the piece covers arrive, or are there.
            elements = [
                prod(s.stop - s.start for s in place)
                for place in [p for _, p in piece.own] + [p.place for p in piece.halo]
            ]
            first = [
                (out.start[d + 2] + s.start) * w.stride - w.padding[0] if c else 0
                for d, (s, w, c) in enumerate(zip(piece.outputs[2:], window, cut, strict=True))
            ]
            inside = [
                min(a + n, size) - max(a, 0)
                for a, n, size in zip(first, piece.shape[2:], sizes, strict=True)
            ]
            assert sum(elements) == prod(piece.shape[:2]) * prod(inside)
        for output in left:
            for o, w, n, a, b, start, c, p in zip(
                output,
                window,
                sizes,
                own.start[2:],
                own.stop[2:],
                out.start[2:],
                cut,
                edge.padding,
                strict=True,
            ):
                if c:
                    at = (start + o) * w.stride - w.padding[0]
                    assert at == a + o * w.stride - p, "the padding does not align the outputs"
                    assert at >= a or a == 0, "an output lacks its lower halo"
                    assert at + w.extent <= b or b == n, "an output lacks its upper halo"
    assert found == bool(reaches(window, sizes, parts))
