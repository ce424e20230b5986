"""Volumes of fractals and their masks, every rank reading its own box."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import distconv as dc
from distconv.data import Dataset, together
from examples.generating.samples import read_facts


class Fractals(Dataset):
    """Images (samples, 3, W, W, W) in [0, 1] and labels (samples, W, W, W). Opening is collective.

    Args:
        path: the HDF5 file written by `generate`.
        grid: the process grid; its axes of the same name cut the dimensions of a mini-batch.
        dtype: the type of the images.

    Attributes:
        facts: the properties of the samples: their scale (the sides W are 2^scale voxels), the seed
            of their classes, the number of categories, and the fractions of voxels in background
            and in each category.

    Raises:
        DataError: on every rank, for a file that is missing, truncated or mis-shaped on any, or is
            not the same on all.
    """

    def __init__(self, path: Path, grid: dc.ProcessGrid, dtype: torch.dtype) -> None:
        self.facts: dict[str, Any] = together(grid, lambda: _facts(path))
        super().__init__(
            path,
            grid,
            inputs="image",
            targets="labels",
            dtype={"image": dtype, "labels": torch.int64},
            transform={"image": _intensity},
        )


def _intensity(block: Tensor, box: dc.Box) -> Tensor:
    return block.div_(255.0)


def _facts(path: Path) -> dict[str, Any]:
    facts = read_facts(path)
    if not {"scale", "seed", "categories", "fractions"} <= facts.keys():
        raise ValueError(
            f"{path} does not say of what classes its fractals are; make it by "
            "examples.fractals.generate"
        )
    return facts
