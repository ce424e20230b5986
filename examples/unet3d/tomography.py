"""Synthetic tomography: organs and lesions as level sets in a body, blurred by the scanner, noisy.

A scene is a list of solids, each where a smooth function of position is positive: ellipsoids whose
surfaces are rippled by a few plane waves. Any box of a volume can be made alone, and boxes fit
together: solids are evaluated in the box and a margin for the blur, and the noise of a plane
depends on its number. Lengths are in voxels, intensities in units of the difference between air and
bright tissue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distconv import Box

Array = NDArray[np.float64]

CLASSES = ("background", "body", "organ", "lesion")
"""The classes by their labels 0, 1, ..."""

BLUR = 0.8
"""Standard deviation of the scanner's Gaussian point spread function, in voxels."""

NOISE = 0.06
"""Standard deviation of the noise."""

MARGIN = 3
"""Voxels around a box that the blur reads: 3.75 deviations."""

VOXELS_AN_ORGAN = 9_000
"""The voxels of a volume for each organ; there are at least two. Larger volumes have more organs,
not larger ones."""


@dataclass(frozen=True)
class Solid:
    """The points x with |turn (x - centre) / radii| < 1 + ripples, of one class and intensity.

    `turn` is a rotation matrix; the ripples are sum_i amplitudes_i sin(waves_i . x + phases_i).
    """

    label: int
    intensity: float
    centre: Array
    radii: Array
    turn: Array
    waves: Array
    amplitudes: Array
    phases: Array

    def reach(self) -> float:
        """Return a distance from the centre beyond which the solid has no points."""
        return float(self.radii.max() * (1.0 + np.abs(self.amplitudes).sum()))

    def contains(self, points: Array) -> NDArray[np.bool_]:
        """Return whether each of the points (3, ...) lies within."""
        shift = self.centre.reshape(3, *[1] * (points.ndim - 1))
        turned = np.tensordot(self.turn, points - shift, 1) / self.radii.reshape(shift.shape)
        distance = np.sqrt((turned**2).sum(0))
        phase = np.tensordot(self.waves, points, 1)
        phase += self.phases.reshape(-1, *[1] * (points.ndim - 1))
        return distance < 1.0 + np.tensordot(self.amplitudes, np.sin(phase), 1)


@dataclass(frozen=True)
class Scene:
    """A volume of a shape (D, H, W): its solids, later ones within earlier ones, and its noise."""

    shape: tuple[int, int, int]
    solids: tuple[tuple[Solid, Solid | None], ...]
    seed: tuple[int, int]

    def image(self, box: Box) -> Array:
        """Return the blurred and noisy image in a box of the volume, of the shape of the box."""
        wide = Box(tuple(a - MARGIN for a in box.start), tuple(b + MARGIN for b in box.stop))
        values = np.zeros(wide.shape)
        for place, inside, solid in self._drawn(wide):
            values[place][inside] = solid.intensity
        offsets = np.arange(-MARGIN, MARGIN + 1)
        weights = np.exp(-0.5 * (offsets / BLUR) ** 2)
        weights /= weights.sum()
        for dimension in range(3):
            n = box.shape[dimension]
            values = sum(
                (
                    w * values.take(np.arange(i, i + n), axis=dimension)
                    for i, w in enumerate(weights)
                ),
                start=np.zeros(()),
            )
        for row, plane in enumerate(range(box.start[0], box.stop[0])):
            random = np.random.default_rng([*self.seed, 1, plane])
            noise = random.normal(scale=NOISE, size=self.shape[1:])
            values[row] += noise[box.slices[1:]]
        return values

    def labels(self, box: Box) -> NDArray[np.uint8]:
        """Return the class of each voxel in a box of the volume, of the shape of the box."""
        labels = np.zeros(box.shape, np.uint8)
        for place, inside, solid in self._drawn(box):
            labels[place][inside] = solid.label
        return labels

    def _drawn(self, box: Box) -> list[tuple[tuple[slice, ...], NDArray[np.bool_], Solid]]:
        """Return for each solid the slices of the box around it, its mask there, and the solid."""
        drawn = []
        for solid, within in self.solids:
            reach = solid.reach()
            ranges = [
                (max(a, int(np.floor(c - reach))), min(b, int(np.ceil(c + reach)) + 1))
                for a, b, c in zip(box.start, box.stop, solid.centre, strict=True)
            ]
            if any(a >= b for a, b in ranges):
                continue
            points = np.stack(
                np.meshgrid(*(np.arange(a, b) for a, b in ranges), indexing="ij")
            ).astype(float)
            inside = solid.contains(points)
            if within is not None:
                inside &= within.contains(points)
            place = tuple(
                slice(a - start, b - start) for (a, b), start in zip(ranges, box.start, strict=True)
            )
            drawn.append((place, inside, solid))
        return drawn


def draw_scene(seed: int, index: int, shape: Sequence[int]) -> Scene:
    """Return the random scene of sample `index`, which does not depend on other draws.

    `shape` is (D, H, W). Organs and lesions have sizes of their own, so that a larger volume has
    more of them.
    """
    depth, height, width = map(int, shape)
    random = np.random.default_rng([seed, index, 0])
    extents = np.array([depth, height, width], float)
    centre = (extents - 1) / 2 + random.uniform(-0.03, 0.03, 3) * extents
    body = Solid(
        label=1,
        intensity=random.uniform(0.35, 0.45),
        centre=centre,
        radii=random.uniform(0.46, 0.54, 3) * extents,
        turn=np.eye(3),
        **_ripples(random, 0.02, 0.2),
    )
    solids: list[tuple[Solid, Solid | None]] = [(body, None)]
    organs = max(2, round(depth * height * width / VOXELS_AN_ORGAN * random.uniform(0.8, 1.2)))
    for _ in range(organs):
        organ = Solid(
            label=2,
            intensity=random.uniform(0.55, 0.85),
            centre=centre + 0.8 * body.radii * _in_ball(random),
            radii=random.uniform(4.0, 8.0, 3),
            turn=_rotation(random),
            **_ripples(random, 0.05, 0.35),
        )
        solids.append((organ, body))
        for _ in range(random.integers(0, 3)):
            # Darker or brighter than its organ, which is the only difference.
            contrast = random.choice([-1.0, 1.0]) * random.uniform(0.3, 0.4)
            lesion = Solid(
                label=3,
                intensity=organ.intensity + contrast,
                centre=organ.centre + 0.6 * organ.turn.T @ (organ.radii * _in_ball(random)),
                radii=random.uniform(2.0, 3.5, 3),
                turn=_rotation(random),
                **_ripples(random, 0.05, 0.8),
            )
            solids.append((lesion, organ))
    return Scene((depth, height, width), tuple(solids), (seed, index))


def _ripples(random: np.random.Generator, amplitude: float, wave: float) -> dict[str, Array]:
    """Return three random plane waves with amplitudes and wave numbers up to these."""
    return {
        "waves": random.uniform(-wave, wave, (3, 3)),
        "amplitudes": random.uniform(-amplitude, amplitude, 3),
        "phases": random.uniform(0.0, 2.0 * np.pi, 3),
    }


def _in_ball(random: np.random.Generator) -> Array:
    """Return a random point of the unit ball."""
    direction = random.normal(size=3)
    return np.asarray(random.uniform() ** (1 / 3) * direction / np.linalg.norm(direction))


def _rotation(random: np.random.Generator) -> Array:
    """Return a random orthogonal matrix."""
    return np.asarray(np.linalg.qr(random.normal(size=(3, 3)))[0])
