"""A transposed convolution writes its own inputs and its halos into a block, and nothing twice."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from distconv.geometry.halo import LocalInput, make_boundary, needs_halo
from distconv.geometry.index_maps import TransposedWindow
from distconv.geometry.layout import default_cuts, rank_box
from distconv.geometry.topology import AXES, Topology

maps = st.builds(
    lambda k, s, d, p, e: TransposedWindow(k, s, d, p, min(e, max(s, d) - 1)),
    st.sampled_from([1, 2, 3, 4, 5]),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(0, 4),
    st.integers(0, 2),
)


@given(st.lists(st.tuples(maps, st.integers(4, 16), st.integers(1, 4)), min_size=2, max_size=2))
def test_every_tap_of_every_output_counts_once(rows: list) -> None:
    spread, sizes, parts = (tuple(column) for column in zip(*rows, strict=True))
    made = tuple(m.output_size(n) for m, n in zip(spread, sizes, strict=True))
    if min(made) < 1:
        return
    reached = needs_halo(spread, sizes, parts)
    if reached is None:
        return
    topology = Topology(tuple({"height": parts[0], "width": parts[1]}.get(a, 1) for a in AXES))
    shape, outputs = (1, 1, *sizes), (1, 1, *made)
    cuts = default_cuts(4, topology)
    found = False
    for rank in range(topology.size):
        own, out = (rank_box(s, cuts, topology, rank) for s in (shape, outputs))
        edge = make_boundary(topology, rank, shape, outputs, cuts, spread)
        found |= bool(edge.slabs)
        counted: Counter[tuple[Any, ...]] = Counter()

        def operate(
            piece: LocalInput,
            crop: Any,
            held: Any,
            starts: Any,
            into: Any,
            taps: Any,
            counted=counted,
        ) -> None:
            """Count where the operator writes the inputs `held`, by output, tap and input."""
            every = [range(a, b) for a, b in taps]
            for at, t in product(held, product(*every)):
                o = tuple(
                    i * m.stride + (j - a) * m.dilation - p - before + b
                    for i, j, (a, _), m, p, (before, _), (b, _) in zip(
                        at, t, taps, spread, piece.padding, crop, into, strict=True
                    )
                )
                if all(a <= i < b for i, (a, b) in zip(o, into, strict=True)):
                    counted[o, t, tuple(i + s for i, s in zip(at, starts, strict=True))] += 1

        every_tap = [(0, m.kernel) for m in spread]

        def size_of(piece: LocalInput, crop: Any, taps: Any = every_tap) -> list[int]:
            """Return the size of the result, as torch has it, along each spatial dimension."""
            return [
                (n - 1) * m.stride - 2 * p + m.dilation * (b - a - 1) + 1 + e - sum(c)
                for n, m, p, (a, b), e, c in zip(
                    piece.shape[2:], spread, piece.padding, taps, piece.extra, crop, strict=True
                )
            ]

        whole = [(0, n) for n in out.shape[2:]]
        block = list(product(*(range(n) for n in own.shape[2:])))
        crop = edge.crop or ((0, 0), (0, 0))
        assert size_of(edge.own, crop) == [n for _, n in whole]
        assert size_of(edge.buffer, edge.buffer.crop or ((0, 0), (0, 0))) == [n for _, n in whole]
        operate(edge.own, crop, block, own.start[2:], whole, every_tap)
        for slab in edge.slabs:
            held = [
                at
                for part in slab.halo
                for at in product(*(range(s.start, s.stop) for s in part.place[2:]))
            ]
            part = slab.halo[0]
            box = edge.plan.receives[part.message].boxes[0]
            starts = [
                m.intervals(n, a, b)[0][0] * bool(axes) + s.start + inside.start - place.start
                for m, n, a, b, axes, s, inside, place in zip(
                    spread, sizes, out.start[2:], out.stop[2:], cuts[2:],
                    box[2:], part.box[2:], part.place[2:], strict=True,
                )
            ]  # fmt: skip
            into, taps = ([(s.start, s.stop) for s in x[2:]] for x in (slab.outputs, slab.taps))
            crop = slab.piece.crop or ((0, 0), (0, 0))
            assert size_of(slab.piece, crop, taps) == [b - a for a, b in into]
            operate(slab.piece, crop, held, starts, into, taps)
        expected = {
            (tuple(o - a for o, a in zip(at, out.start[2:], strict=True)), t, i)
            for i in product(*(range(n) for n in sizes))
            for t in product(*(range(m.kernel) for m in spread))
            for at in [
                tuple(
                    i * m.stride + j * m.dilation - m.padding
                    for i, j, m in zip(i, t, spread, strict=True)
                )
            ]
            if all(a <= o < b for o, a, b in zip(at, out.start[2:], out.stop[2:], strict=True))
        }
        assert set(counted) == expected and set(counted.values()) <= {1}
    assert found == reached
