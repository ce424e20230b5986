"""Volumes with instances of fractals, and the class of each voxel; any box can be made alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distconv import Box

from .systems import INSTANCES, STEPS, cloud, draw_class, instance_of, middle_and_extent

FRACTALS = 3
"""The number of instances in a volume."""

COLOUR = (230, 150, 60)
"""The colour of all points, in three channels of 8 bits: classes differ in form alone."""

DENSITY = 8
"""Points of an instance, over the pixels of a face of the volume."""


@dataclass(frozen=True)
class Volume:
    """A cube of 2^scale voxels a side, with instances (class, number), later ones over earlier."""

    scale: int
    seed: int
    instances: tuple[tuple[int, int], ...]

    def labels(self, box: Box) -> NDArray[np.uint8]:
        """Return labels in a box of (D, H, W): 1 + the class for voxels with a point, and 0 for
        others.

        Points are drawn one set of orbits after the other, and those in the box are kept.
        """
        labels = np.zeros(box.shape, np.uint8)
        side = 2**self.scale
        start, stop = np.array(box.start), np.array(box.stop)
        for category, instance in self.instances:
            maps = instance_of(draw_class(self.seed, category), instance)
            middle, extent = middle_and_extent(self.seed, category, instance)
            orbits = max(1, DENSITY * side**2 // STEPS)
            # Other orbits than those that determine the place.
            for points in cloud(maps, orbits, (self.seed, category, instance, 1)):
                places = np.floor((points - middle) * (side / 2 / extent) + side / 2)
                within = ((places >= start) & (places < stop)).all(1)
                own = (places[within] - start).astype(np.intp)
                labels[tuple(own.T)] = 1 + category
        return labels


def image_of(labels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the volume (3, D, H, W) of a mask (D, H, W): one colour where there is a point."""
    return np.array(COLOUR, np.uint8).reshape(3, 1, 1, 1) * (labels > 0)


def draw_volume(seed: int, index: int, scale: int, categories: int) -> Volume:
    """Return volume `index`: random instances, which do not depend on other draws."""
    random = np.random.default_rng([seed, index, 2])
    instances = [
        (int(random.integers(categories)), int(random.integers(INSTANCES))) for _ in range(FRACTALS)
    ]
    return Volume(scale, seed, tuple(instances))
