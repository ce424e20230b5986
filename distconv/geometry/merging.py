"""Dimensions that a reshape splits and merges: the factors that stay side by side.

Index arithmetic only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from distconv.geometry.layout import Shape


def groups(before: Shape, after: Shape) -> list[tuple[range, range]]:
    """Return the shortest runs of dimensions of two shapes that have equal numbers of elements.

    The runs follow each other in both shapes; each pair has the run of `before` and that of
    `after`.
    """
    if 0 in before:
        return [(range(len(before)), range(len(after)))]
    found = []
    i = j = 0
    while i < len(before) or j < len(after):
        i0, j0 = i, j
        n = m = 1
        if i < len(before):
            n, i = before[i], i + 1
        if j < len(after):
            m, j = after[j], j + 1
        while n != m:
            if n < m:
                n, i = n * before[i], i + 1
            else:
                m, j = m * after[j], j + 1
        found.append((range(i0, i), range(j0, j)))
    return found


def common_factors(splits: Sequence[Sequence[int]]) -> Shape | None:
    """Return the coarsest factors that make each of `splits` by multiplying neighbours.

    Returns None for a size of 0, and if there are no such factors: (2, 3) divides 6 positions at 2,
    and (3, 2) divides them at 3, which is no multiple of 2.
    """
    if any(0 in row for row in splits):
        return None
    factors: list[int] = []
    last = 1
    for bound in sorted({bound for row in splits for bound in accumulate(row, mul)}):
        if bound % last:
            return None
        if bound > last:
            factors.append(bound // last)
            last = bound
    return tuple(factors) or (1,)


def merged_runs(factors: Sequence[int], sizes: Sequence[int]) -> tuple[Shape, ...]:
    """Return for each of `sizes` the consecutive `factors` with that product; (1,) for size 1.

    A factor 1 is allowed only where a size is 1.
    """
    runs, i = [], 0
    for n in sizes:
        start, product = i, 1
        while product < n:
            product, i = product * factors[i], i + 1
        i += n == 1 and i < len(factors) and factors[i] == 1
        runs.append(tuple(factors[start:i]) or (1,))
    return tuple(runs)


def factors_of_reshape(before: Shape, after: Shape) -> tuple[Shape, ...] | None:
    """Return for each dimension of `after` the factors that it shares with dimensions of `before`.

    Each dimension of `before` is a product of these factors, too. Returns None if there are no
    factors that fit both shapes.
    """
    found: list[Shape] = []
    for old, new in groups(before, after):
        factors = common_factors([before[old.start : old.stop], after[new.start : new.stop]])
        if factors is None:
            return None
        found += merged_runs(factors, after[new.start : new.stop])
    return tuple(found)
