"""Files of volumes and their labels; each rank writes boxes and counts the classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

import distconv as dc
from distconv import Box
from distconv.data import together
from examples.generating.command_line import Progress
from examples.generating.samples import create_samples


def write_volumes(
    grid: dc.ProcessGrid,
    path: Path,
    shapes: tuple[Sequence[int], Sequence[int]],
    dtype: DTypeLike,
    facts: Mapping[str, Any],
    own: range,
    box: Box,
    draw: Callable[[int], tuple[np.ndarray, np.ndarray]],
    classes: int,
    progress: Progress | None,
) -> list[float]:
    """Write images and labels into a new file, each rank its boxes. Collective.

    Returns the fraction of voxels of each class, which is also an attribute of the file.

    Args:
        shapes: the shapes of all images (samples, C, D, H, W), and of all labels (samples, D, H,
        W).
        dtype: the type of the images; labels have 8 bits.
        facts: the properties of the samples.
        own: the samples of which this rank writes a box.
        box: the box of voxels (D, H, W) that it writes of each.
        draw: returns image (C, D, H, W) and labels (D, H, W) of a sample in the box.
        progress: called with the number of finished samples.

    Raises:
        DataError: on every rank, where the file cannot be written.
    """
    arrays = {"image": (shapes[0], dtype), "labels": (shapes[1], np.uint8)}
    with create_samples(grid, path, arrays, facts) as opened:

        def write() -> np.ndarray:
            counts = np.zeros(classes)
            for index in own:
                image, labels = draw(index)
                opened.write("image", (index, 0, *box.start), image[None])
                opened.write("labels", (index, *box.start), labels[None])
                counts += np.bincount(labels.reshape(-1), minlength=classes)
                if progress is not None:
                    progress(min(own.stop, index + own.step))
            return counts

        counts = sum(grid.all_gather_object(together(grid, write)))
        fractions: list[float] = (counts / counts.sum()).tolist()
        opened.facts["fractions"] = fractions
    return fractions
