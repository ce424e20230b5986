"""The quality metrics of the Verdict library for quadrilaterals, vectorised over zones.

Source: C. J. Stimpson, C. D. Ernst, P. Knupp, P. P. Pebay, D. Thompson, "The Verdict Geometric
Quality Library", Sandia National Laboratories, SAND2007-1751 (2007), chapter on quadrilaterals.

Notation, after the manual: P0, P1, P2, P3 are a zone's nodes, counter-clockwise; L_k = P_{k+1} -
P_k its edges; a_k = L_{k-1} x L_k the Jacobian at corner k; X1 = (P1 - P0) + (P2 - P3) and X2 =
(P2 - P1) + (P3 - P0) the principal axes; X12 = (P0 - P1) + (P2 - P3) the cross derivative; indices
are modulo 4. Arrays of vectors have x and y first, then the four corners, then the zones.

Degenerate zones have finite metrics. Where Verdict answers with its VERDICT_DBL_MAX (1e30) or with
minus that, these functions answer with CAP or minus CAP, and every unbounded ratio is cut off
there: beyond it a zone is as good as tangled, and a float32 network has no use for the difference.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

CAP = 100.0
"""Largest magnitude of the unbounded dimensionless metrics (Verdict: VERDICT_DBL_MAX, 1e30)."""

TINY = 1e-30
"""Lengths, areas and their squares up to this one are treated as zero (VERDICT_DBL_MIN)."""


def corners_of(nodes: Array) -> Array:
    """Return the four nodes of every zone of a structured mesh, counter-clockwise.

    `nodes` has shape (2, rows + 1, columns + 1): x, which grows with the column, and y, which grows
    with the row. The result has shape (2, 4, rows, columns).
    """
    return np.stack(
        [nodes[:, :-1, :-1], nodes[:, :-1, 1:], nodes[:, 1:, 1:], nodes[:, 1:, :-1]], axis=1
    )


def edges_of(corners: Array) -> Array:
    """Return the edges L_k = P_{k+1} - P_k. `corners` and the result have shape (2, 4, *zones)."""
    return np.roll(corners, -1, axis=1) - corners


def corner_jacobians(corners: Array) -> Array:
    """Return the Jacobian a_k = L_{k-1} x L_k at every corner: twice the area of the corner's
    triangle.

    `corners` has shape (2, 4, *zones), the result (4, *zones), in units of length squared. A zone
    is valid where all four are positive, and tangled elsewhere.
    """
    x, y = edges_of(corners)
    return np.roll(x, 1, axis=0) * y - np.roll(y, 1, axis=0) * x


class Quadrilaterals:
    """Zones, with the quantities that several metrics share; all have the zones' shape last.

    Args:
        corners: the nodes P_k of the zones, (2, 4, *zones).
    """

    def __init__(self, corners: Array) -> None:
        edges = edges_of(corners)
        self.corners, self.edges = corners, edges  # P_k and L_k
        self.corner_jacobians = corner_jacobians(corners)  # a_k
        self.corner_dots = -_dot(np.roll(edges, 1, axis=1), edges)  # -L_{k-1} . L_k
        self.squared_lengths = _dot(edges, edges)  # |L_k|^2
        self.lengths = np.sqrt(self.squared_lengths)
        self.length_products = np.roll(self.lengths, 1, axis=0) * self.lengths  # |L_{k-1}| |L_k|
        self.length_square_sums = np.roll(self.squared_lengths, 1, axis=0) + self.squared_lengths
        cosines = _ratio(self.corner_dots, self.length_products, if_zero=0.0)
        self.corner_cosines = np.clip(cosines, -1.0, 1.0)  # of the included angles
        self.principal_axes = edges[:, :2] - edges[:, 2:]  # X1 and X2, the second index
        self.principal_lengths = np.sqrt(_dot(self.principal_axes, self.principal_axes))
        self.has_zero_edge = self.squared_lengths.min(axis=0) <= TINY  # two nodes coincide


def area(zones: Quadrilaterals) -> Array:
    """Return the signed area, (a_0 + a_1 + a_2 + a_3) / 4, a volume; negative if inverted."""
    return zones.corner_jacobians.mean(axis=0)


def aspect_ratio(zones: Quadrilaterals) -> Array:
    """Return the longest edge times perimeter, max|L_k| (|L_0| + |L_1| + |L_2| + |L_3|) / (4
    |area|).

    In [1, CAP], square 1; CAP where the area is zero.
    """
    lengths = zones.lengths
    return _ratio(lengths.max(axis=0) * lengths.sum(axis=0), 4.0 * np.abs(area(zones)), if_zero=CAP)


def condition_number(zones: Quadrilaterals) -> Array:
    """Return the largest condition number of a corner's matrix, max (|L_{k-1}|^2 + |L_k|^2) /
    (2 a_k).

    In [1, CAP], square 1; CAP where some a_k is not positive.
    """
    ratios = _ratio(zones.length_square_sums, 2.0 * zones.corner_jacobians, if_zero=CAP)
    return ratios.max(axis=0)


def distortion(zones: Quadrilaterals) -> Array:
    """Return the least Jacobian over the mean one, min a_k / |area|. In [-CAP, 1],
    parallelograms 1.

    It is the manual's min|J| * 4 / area: the Jacobian of the bilinear map is least at a corner,
    where it is a_k / 4. -CAP where the area is zero.
    """
    return _ratio(jacobian(zones), np.abs(area(zones)), if_zero=-CAP)


def jacobian(zones: Quadrilaterals) -> Array:
    """Return the least corner Jacobian, min a_k, in units of length squared. Unit square 1."""
    return zones.corner_jacobians.min(axis=0)


def largest_angle(zones: Quadrilaterals) -> Array:
    """Return the largest included angle in degrees, arccos of -L_{k-1} . L_k / (|L_{k-1}| |L_k|).

    In [90, 360], rectangles 90. It is 360 minus that where some a_k is negative, as the included
    angle is the reflex one there; 0 where two neighbouring nodes coincide, as in Verdict.
    """
    angle = np.degrees(np.arccos(zones.corner_cosines.min(axis=0)))
    angle = np.where(jacobian(zones) < 0.0, 360.0 - angle, angle)
    return np.where(zones.has_zero_edge, 0.0, angle)


def oddy(zones: Quadrilaterals) -> Array:
    """Return the largest deviation of a corner's metric tensor from a multiple of the identity.

    max ((|L_{k-1}|^2 - |L_k|^2)^2 + 4 (L_{k-1} . L_k)^2) / (2 a_k^2). In [0, CAP], square 0; CAP
    where some a_k is zero.
    """
    squares = zones.squared_lengths
    deviation = (np.roll(squares, 1, axis=0) - squares) ** 2 + 4.0 * zones.corner_dots**2
    return _ratio(deviation, 2.0 * zones.corner_jacobians**2, if_zero=CAP).max(axis=0)


def scaled_jacobian(zones: Quadrilaterals) -> Array:
    """Return the least sine of an included angle, min a_k / (|L_{k-1}| |L_k|).

    It lies in [-1, 1]: 1 for rectangles, 0 where two neighbouring nodes coincide.
    """
    sines = _ratio(zones.corner_jacobians, zones.length_products, if_zero=0.0).min(axis=0)
    return np.where(zones.has_zero_edge, 0.0, np.clip(sines, -1.0, 1.0))


def shape(zones: Quadrilaterals) -> Array:
    """Return the inverse of the condition number, max(0, min 2 a_k / (|L_{k-1}|^2 + |L_k|^2)).

    In [0, 1], square 1; 0 where two neighbouring nodes coincide or some a_k is not positive.
    """
    ratios = _ratio(2.0 * zones.corner_jacobians, zones.length_square_sums, if_zero=0.0)
    return np.where(zones.has_zero_edge, 0.0, np.maximum(ratios.min(axis=0), 0.0))


def shear(zones: Quadrilaterals) -> Array:
    """Return the scaled Jacobian where it is positive, else 0. In [0, 1], rectangles 1."""
    return np.maximum(scaled_jacobian(zones), 0.0)


def skew(zones: Quadrilaterals) -> Array:
    """Return the cosine between the principal axes, |X1 . X2| / (|X1| |X2|). In [0, 1],
    rectangles 0.

    0 where a principal axis vanishes.
    """
    dots = np.abs(_dot(zones.principal_axes[:, 0], zones.principal_axes[:, 1]))
    cosines = _ratio(dots, zones.principal_lengths.prod(axis=0), if_zero=0.0)
    return np.minimum(cosines, 1.0)


def smallest_angle(zones: Quadrilaterals) -> Array:
    """Return the smallest included angle in degrees, arccos of -L_{k-1} . L_k / (|L_{k-1}| |L_k|).

    In [0, 90], rectangles 90; 360 where two neighbouring nodes coincide, as in Verdict.
    """
    angle = np.degrees(np.arccos(zones.corner_cosines.max(axis=0)))
    return np.where(zones.has_zero_edge, 360.0, angle)


def stretch(zones: Quadrilaterals) -> Array:
    """Return the shortest edge over longest diagonal, sqrt(2) min|L_k| / max(|P2 - P0|, |P3 - P1|).

    In [0, 1] for valid zones, at most CAP for any, square 1; CAP where both diagonals vanish.
    """
    diagonals = zones.corners[:, 2:] - zones.corners[:, :2]
    longest = np.sqrt(_dot(diagonals, diagonals).max(axis=0))
    return _ratio(np.sqrt(2.0) * zones.lengths.min(axis=0), longest, if_zero=CAP)


def taper(zones: Quadrilaterals) -> Array:
    """Return the cross derivative over the shorter principal axis, |X12| / min(|X1|, |X2|).

    In [0, CAP], parallelograms 0; CAP where a principal axis vanishes.
    """
    cross_derivative = zones.edges[:, 0] + zones.edges[:, 2]  # minus X12
    length = np.sqrt(_dot(cross_derivative, cross_derivative))
    return _ratio(length, zones.principal_lengths.min(axis=0), if_zero=CAP)


METRICS: dict[str, Callable[[Quadrilaterals], Array]] = {
    "aspect ratio": aspect_ratio,
    "condition number": condition_number,
    "distortion": distortion,
    "Jacobian": jacobian,
    "largest angle": largest_angle,
    "oddy": oddy,
    "scaled Jacobian": scaled_jacobian,
    "shape": shape,
    "shear": shear,
    "skew": skew,
    "smallest angle": smallest_angle,
    "stretch": stretch,
    "taper": taper,
    "volume": area,
}
"""The fourteen metrics by name."""


def _dot(first: Array, second: Array) -> Array:
    """Return the dot product of vectors whose components lie along the first axis."""
    return first[0] * second[0] + first[1] * second[1]


def _ratio(numerator: Array, denominator: Array, *, if_zero: float) -> Array:
    """Return the quotient, cut off at +-CAP; `if_zero` where the denominator is not above TINY."""
    quotient = np.full(np.shape(denominator), if_zero)
    # Overflow is expected here: the cap cuts off an infinite quotient.
    with np.errstate(over="ignore"):
        np.divide(numerator, denominator, out=quotient, where=denominator > TINY)
    return np.clip(quotient, -CAP, CAP)
