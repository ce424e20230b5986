"""Decisions from a few parts are those from all parts, and cost no more where there are many."""

from __future__ import annotations

from typing import Any
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from distconv.geometry import halo
from distconv.geometry.index_maps import Same, TransposedWindow, Window
from distconv.geometry.layout import block, default_cuts, distinct_parts
from distconv.geometry.plan import make_plan
from distconv.geometry.topology import AXES, Topology

small, sizes, parts = st.integers(0, 3), st.integers(1, 60), st.integers(2, 24)
windows = st.builds(
    Window, st.integers(1, 5), st.integers(1, 3), st.integers(1, 2), st.tuples(small, small)
)
transposed = st.builds(
    TransposedWindow, st.integers(1, 5), st.integers(1, 3), st.integers(1, 2), small, small
)


def from_all_parts(*arguments: Any) -> Any:
    """Return the decision of `needs_halo` from every part, without its cache."""
    with mock.patch.object(halo, "distinct_parts", lambda a, b, n, steps: range(n)):
        return halo.needs_halo.__wrapped__(*arguments)


@given(windows, sizes, parts)
def test_halos_of_convolutions_are_decided_as_from_all_parts(w: Window, n: int, p: int) -> None:
    if w.output_size(n) < 0:
        return
    case = (w,), (n,), (p,)
    assert halo.needs_halo(*case) == from_all_parts(*case)


@given(transposed, sizes, parts)
def test_halos_of_transposed_convolutions_are_decided_as_from_all_parts(
    m: TransposedWindow, n: int, p: int
) -> None:
    if m.output_size(n) < 0:
        return
    case = (m,), (n,), (p,)
    assert halo.needs_halo(*case) == from_all_parts(*case)


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 40), st.integers(1, 3))
def test_parts_left_out_lie_as_those_before_them(a: int, b: int, p: int, step: int) -> None:
    def described(j: int) -> tuple[int, ...]:
        first, second = block(a, p, j), block(b, p, j)
        lengths = first[1] - first[0], second[1] - second[0]
        return *lengths, first[0] - step * second[0], j == 0, j == p - 1

    chosen = list(distinct_parts(a, b, p, (1, step)))
    assert chosen == sorted(set(chosen))
    assert {described(j) for j in range(p)} == {described(j) for j in chosen}


def test_a_rank_of_very_many_looks_at_its_neighbours_alone() -> None:
    many = 2**40
    topology = Topology(tuple(many if axis == "height" else 1 for axis in AXES))
    window = Window(3, padding=(1, 1))
    shape, cuts = (1, 2, 8 * many + 5, 4), default_cuts(4, topology)
    plan = make_plan(topology, many // 2, shape, cuts, cuts, (Same(), Same(), window, Same()))
    assert [r.peer for r in plan.receives] == [many // 2 - 1, many // 2 + 1]
    assert [r.peer for r in plan.sends] == [many // 2 - 1, many // 2 + 1]
    assert halo.needs_halo((window,), shape[2:3], (many,)) is True
    even = (TransposedWindow(4, 2, padding=1),), (8 * many,), (many,)
    assert halo.needs_halo(*even) is True
