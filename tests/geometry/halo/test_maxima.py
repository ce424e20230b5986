"""The strips of max pooling: every output that needs a halo once, with all inputs that it needs."""

from __future__ import annotations

from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from distconv.geometry.halo.convolution import needs_halo
from distconv.geometry.halo.maxima import maxima_boundary
from distconv.geometry.index_maps import Window
from distconv.geometry.layout import default_cuts, rank_box
from distconv.geometry.topology import AXES, Topology

windows = st.builds(
    lambda k, s, d, p, c: Window(k, s, d, (min(p, k // 2),) * 2, c),
    st.sampled_from([1, 2, 3, 5]),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(0, 2),
    st.booleans(),
)
rows = st.lists(st.tuples(windows, st.integers(4, 20), st.integers(1, 4)), min_size=2, max_size=2)


@given(rows, st.booleans())
def test_what_needs_halos_is_computed_once_from_all_that_it_needs(
    rows: list, ceil_mode: bool
) -> None:
    window, sizes, parts = (tuple(column) for column in zip(*rows, strict=True))
    made = tuple(w.output_size(n) for w, n in zip(window, sizes, strict=True))
    reached = needs_halo(window, sizes, parts, pooled=True, ceil_mode=ceil_mode)
    if min(made) < 1 or reached is None:
        return
    topology = Topology(tuple({"height": parts[0], "width": parts[1]}.get(a, 1) for a in AXES))
    shape, outputs = (1, 1, *sizes), (1, 1, *made)
    cuts = default_cuts(4, topology)
    found = False
    for rank in range(topology.size):
        own, out = (rank_box(s, cuts, topology, rank) for s in (shape, outputs))
        edge = maxima_boundary(topology, rank, shape, outputs, cuts, window)
        found |= bool(edge.strips)
        block = set(product(*map(range, own.start[2:], own.stop[2:])))

        def seen_by(output: tuple[int, ...]) -> set[tuple[int, ...]]:
            """Return the inputs in the plane that an output looks at."""
            firsts = (o * w.stride - w.padding[0] for o, w in zip(output, window, strict=True))
            taps = (
                [i for t in range(w.kernel) if 0 <= (i := first + t * w.dilation) < n]
                for w, n, first in zip(window, sizes, firsts, strict=True)
            )
            return set(product(*taps))

        again: Counter[tuple[int, ...]] = Counter()
        for strip in edge.strips:
            held: Counter[tuple[int, ...]] = Counter()
            places = [place for _, place in strip.own] + [part.place for part in strip.halo]
            for place in places:
                spans = (
                    range(s.start + a, s.stop + a)
                    for s, a in zip(place[2:], strip.starts, strict=True)
                )
                held.update(product(*spans))
            assert set(held.values()) == {1}
            spans = (
                range(s.start + a, s.stop + a)
                for s, a in zip(strip.outputs[2:], out.start[2:], strict=True)
            )
            for output in product(*spans):
                again[output] += 1
                assert seen_by(output) <= set(held)
        needy = {o for o in product(*map(range, out.start[2:], out.stop[2:])) if seen_by(o) - block}
        assert needy <= set(again) and set(again.values()) <= {1}
    assert found == reached
