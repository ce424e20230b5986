"""Volumes and their labels; every rank reads, or makes, its own box."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import distconv as dc
from distconv.data import Dataset, Flip, Function

from .tomography import draw_scene


class Volumes(Dataset):
    """Images (samples, 1, D, H, W) and their labels (samples, D, H, W). Opening it is collective.

    Args:
        path: the HDF5 file written by `generate`.
        grid: the process grid; its axes of the same name cut the dimensions of a mini-batch.
        dtype: the type of the images.
        augment: whether to flip samples at random.

    Raises:
        DataError: on every rank, for a file that is missing, truncated or mis-shaped on any, or is
            not the same on all.
    """

    def __init__(
        self, path: Path, grid: dc.ProcessGrid, dtype: torch.dtype, augment: bool = False
    ) -> None:
        super().__init__(
            path,
            grid,
            inputs="image",
            targets="labels",
            dtype={"image": dtype, "labels": torch.int64},
            augment=(Flip(),) if augment else (),
        )
        dc.data.together(grid, lambda: self._check(path))

    def _check(self, path: Path) -> None:
        image, labels = (self.fields[name].shape for name in ("image", "labels"))
        if len(image) != 4 or image[0] != 1 or labels != image[1:]:
            raise ValueError(
                f"{path}: 'image' has samples of shape {image} and 'labels' of {labels}; expected "
                "(1, D, H, W) and (D, H, W)"
            )

    @property
    def size(self) -> tuple[int, ...]:
        """Return the sides (D, H, W) of a volume."""
        return self.fields["labels"].shape


def made_volume(
    seed: int, index: int, shape: Sequence[int], grid: dc.ProcessGrid, dtype: torch.dtype
) -> Dataset:
    """Return one synthetic volume that is stored nowhere: each rank makes its box. Collective."""
    scene = draw_scene(seed, index, shape)

    def image(sample: int, box: dc.Box) -> np.ndarray:
        return scene.image(dc.Box(box.start[1:], box.stop[1:]))[None]

    def labels(sample: int, box: dc.Box) -> np.ndarray:
        return scene.labels(box)

    fields = {
        "image": Function(image, 1, (1, *scene.shape), "float32"),
        "labels": Function(labels, 1, scene.shape, "uint8"),
    }
    return Dataset(fields, grid, dtype={"image": dtype, "labels": torch.int64})
