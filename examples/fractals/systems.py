"""Iterated function systems in three dimensions, and the clouds of points on their attractors.

A system is 2 to 8 affine maps, each of 12 numbers, a 3x3 matrix and a translation. The chaos game
(Barnsley, "Fractals Everywhere", 1988) visits its attractor: a point is mapped again and again, by
maps chosen at random, with probabilities in proportion to the absolute determinants of their
matrices. A *class* is a system; its *instances* are the system itself, and systems in which one of
the 12 numbers of all its maps is multiplied by a factor.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

MOST_MAPS = 8
FACTORS = tuple(n / 10 for n in range(4, 17) if n != 10)
INSTANCES = 1 + 12 * len(FACTORS)
"""The instances of a class: 145."""

LARGEST_ENTRY = 0.6
"""The largest entry of matrices; translations go up to 1. With larger ones few contract."""

LEAST_VARIANCE = 0.15
"""The least variance of all coordinates of a class's cloud in [-1, 1]: clouds with less are a heap
with a few points around it."""

SETTLING = 32
"""Steps after which an orbit is treated as on the attractor."""

STEPS = 64
"""Points of an orbit after these steps."""

_ORBITS = 2**12
"""Orbits computed at the same time; the memory of a cloud is proportional to it."""

_REFERENCE = 2**8
"""Orbits from which the middle and the extent of an instance are computed."""


def cloud(maps: Array, orbits: int, seed: tuple[int, ...]) -> Iterator[Array]:
    """Yield the points (n, 3) of `orbits` orbits of `maps` (maps, 3, 4), `STEPS` of each.

    They depend on `seed` and the number of the orbit alone.
    """
    bounds = np.cumsum(probabilities(maps))
    bounds[-1] = 1.0
    for begin in range(0, orbits, _ORBITS):
        random = np.random.default_rng([*seed, begin])
        points = np.zeros((min(_ORBITS, orbits - begin), 3))
        for step in range(SETTLING + STEPS):
            chosen = maps[np.searchsorted(bounds, random.random(len(points)), side="right")]
            points = np.einsum("nij,nj->ni", chosen[:, :, :3], points) + chosen[:, :, 3]
            if step >= SETTLING:
                yield points


def instance_of(maps: Array, instance: int) -> Array:
    """Return the maps of one of the `INSTANCES` of a class; instance 0 is the class itself."""
    if instance == 0:
        return maps
    number, factor = divmod(instance - 1, len(FACTORS))
    row, column = divmod(number, 4)
    changed = maps.copy()
    changed[:, row, column] *= FACTORS[factor]
    return changed


@lru_cache(maxsize=1024)
def middle_and_extent(seed: int, category: int, instance: int) -> tuple[Array, float]:
    """Return the middle of an instance's box and half its largest side, by which it fills [-1,
    1]^3.

    They are computed from a fixed small cloud, so that an instance has the same place at all
    scales.
    """
    maps = instance_of(draw_class(seed, category), instance)
    return _place(_reference(maps, (seed, category, instance)))


@lru_cache(maxsize=64)
def draw_class(seed: int, category: int) -> Array:
    """Return the maps (maps, 3, 4) of a class, which depend on `seed` and its number alone.

    Systems are drawn until the class and all its instances contract in the mean square, so that
    their clouds are finite and have a variance with any number of points, and until the cloud of
    the class, in [-1, 1]^3, has a variance of at least `LEAST_VARIANCE`.
    """
    random = np.random.default_rng([seed, category])
    while True:
        count = random.integers(2, MOST_MAPS + 1)
        matrices = random.uniform(-LARGEST_ENTRY, LARGEST_ENTRY, (count, 3, 3))
        maps = np.concatenate([matrices, random.uniform(-1.0, 1.0, (count, 3, 1))], 2)
        # If the class itself does not contract, its instances need no check.
        if not all(contracts(instance_of(maps, number)) for number in range(INSTANCES)):
            continue
        points = _reference(maps, (seed, category, 0))
        middle, extent = _place(points)
        if ((points - middle) / extent).var() >= LEAST_VARIANCE:
            return maps


def contracts(maps: Array) -> bool:
    """Return whether a step of the chaos game brings two points nearer in the mean square.

    Then there is one stationary distribution, and it has a variance (Barnsley and Elton, Advances
    in Applied Probability 20, 1988).
    """
    squares = np.linalg.norm(maps[:, :, :3], 2, axis=(1, 2)) ** 2
    return bool((probabilities(maps) * squares).sum() < 1.0)


def probabilities(maps: Array) -> Array:
    """Return the probability of each of the maps."""
    determinants = np.abs(np.linalg.det(maps[:, :, :3]))
    return np.asarray(determinants / determinants.sum())


def _reference(maps: Array, seed: tuple[int, ...]) -> Array:
    return np.concatenate(list(cloud(maps, _REFERENCE, seed)))


def _place(points: Array) -> tuple[Array, float]:
    low, high = points.min(0), points.max(0)
    return (low + high) / 2, float((high - low).max() / 2) or 1.0
