"""The factors that the dimensions before and after a reshape share."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distconv.geometry.layout import common_factors, factors_of_reshape, groups, runs_of_factors

factors = st.lists(st.integers(1, 5), min_size=1, max_size=6)


@st.composite
def mergers(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of which each merges runs of the same factors."""
    row = draw(factors)

    def merged() -> tuple[int, ...]:
        ends = sorted(draw(st.sets(st.integers(0, len(row)))) | {0, len(row)})
        return tuple(prod(row[a:b]) for a, b in zip(ends, ends[1:], strict=False))

    return merged(), merged()


@given(mergers())
def test_shapes_that_merge_the_same_factors_share_factors(shapes: tuple) -> None:
    before, after = shapes
    found = factors_of_reshape(before, after)
    assert found is not None and tuple(map(prod, found)) == after
    row = [n for run in found for n in run if n > 1]
    # The dimensions before are products of runs of them, too.
    bounds = set(np.cumprod([1, *row]).tolist())
    assert set(np.cumprod([1, *before]).tolist()) <= bounds


@given(factors, factors)
def test_factors_are_the_fewest_and_none_where_bounds_do_not_divide(a: list, b: list) -> None:
    b = [*b, prod(a)]
    a = [*a, prod(b[:-1])]  # the same product
    found = common_factors([a, b])
    bounds = sorted(set(np.cumprod(a).tolist()) | set(np.cumprod(b).tolist()) | {1})
    nested = all(large % small == 0 for small, large in zip(bounds, bounds[1:], strict=False))
    assert (found is not None) == nested
    if found is not None:
        assert np.cumprod([1, *found]).tolist()[-len(bounds) :][-1] == prod(a)
        assert sorted({1, *np.cumprod(found).tolist()}) == bounds


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ((2, 3, 8, 5), (2, 3, 40), ((2,), (3,), (8, 5))),
        ((2, 3, 8, 5), (12, 4, 5), ((2, 3, 2), (4,), (5,))),
        ((2, 1, 3), (6, 1), ((2, 3), (1,))),
        ((4, 6), (6, 4), None),
        ((1, 1), (1,), ((1,),)),
        ((), (1, 1), ((1,), (1,))),
    ],
)
def test_factors_of_some_reshapes(before: tuple, after: tuple, found: tuple | None) -> None:
    assert factors_of_reshape(before, after) == found


def test_runs_take_dimensions_of_one_element_for_themselves() -> None:
    assert runs_of_factors((2, 3, 1, 4, 1), (6, 1, 4, 1)) == ((2, 3), (1,), (4,), (1,))
    assert runs_of_factors((2, 3), (2, 1, 3)) == ((2,), (1,), (3,))


def test_groups_are_the_shortest_runs_of_equal_product() -> None:
    assert groups((2, 6, 5), (3, 4, 5)) == [(range(2), range(2)), (range(2, 3), range(2, 3))]
