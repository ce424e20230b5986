"""Universes, or equal parts of them, every rank reading its own box."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import distconv as dc
from distconv.data import Dataset, Flip, HDF5Source, Normalize, Rotate90, Source, together
from distconv.data.sources.interface import Array
from examples.generating.samples import read_facts

from .cosmology import RANGES

TURNS = (Flip(), Rotate90(("depth", "height")), Rotate90(("height", "width")))
"""The 24 rotations of a cube."""


class Universes(Dataset):
    """Logarithmic, normalised densities (samples, 4, W, W, W), and parameters (samples, 4) as their
    places in their ranges, -1 to 1. Opening it is collective.

    Args:
        path: the HDF5 file written by `generate`.
        grid: the process grid; its axes of the same name cut the dimensions of a mini-batch.
        dtype: the type of the tensors.
        parts: the number of parts of every universe along each side; each part is a sample, and
            the parts of a universe follow each other.
        normalise_as: a dataset whose mean and deviation of each channel are used: normalise a
            validation set as its training set.
        augment: flip and rotate samples at random, as no direction is special.

    Attributes:
        size: W, the side of a sample.
        samples_a_universe: parts^3.

    Raises:
        DataError: on every rank, for a file that is missing, truncated or mis-shaped on any, or is
            not the same on all.
    """

    def __init__(
        self,
        path: Path,
        grid: dc.ProcessGrid,
        dtype: torch.dtype = torch.float32,
        parts: int = 1,
        normalise_as: Universes | None = None,
        augment: bool = False,
    ) -> None:
        facts = together(grid, lambda: read_facts(path))

        def opened() -> tuple[dict[str, Source], Normalize]:
            density, parameters = HDF5Source(path, "density"), HDF5Source(path, "parameters")
            _check(path, density, parameters, parts)
            if not {"log_mean", "log_deviation"} <= facts.keys():
                raise ValueError(
                    f"{path} lacks the mean and deviation of log(1 + density); make it by "
                    "examples.cosmoflow.generate"
                )
            normalize = Normalize(facts["log_mean"], facts["log_deviation"])
            sources = {
                "density": Parts(density, parts),
                "parameters": Repeated(parameters, parts**3),
            }
            return sources, normalize

        sources, own = together(grid, opened)
        self.normalize: Normalize = normalise_as.normalize if normalise_as else own
        self.size = sources["density"].shape[-1]
        self.samples_a_universe = parts**3
        super().__init__(
            sources,
            grid,
            dtype=dtype,
            transform={"density": self._logarithm, "parameters": place_in_range},
            augment=TURNS if augment else (),
        )

    def _logarithm(self, block: Tensor, box: dc.Box) -> Tensor:
        return self.normalize(block.log1p_(), box)


class Parts(Source):
    """The equal cubic parts of samples (channels, W, W, W), each a sample of its own.

    Args:
        whole: the whole samples.
        parts: the number of parts along each side; divides W.
    """

    def __init__(self, whole: Source, parts: int) -> None:
        channels, width = whole.shape[0], whole.shape[-1]
        self._whole, self._parts, self._side = whole, parts, width // parts
        self.name = whole.name
        self.samples = whole.samples * parts**3
        self.shape = (channels, *3 * (self._side,))
        self.dtype = whole.dtype

    def read_into(self, out: Array, sample: int, box: dc.Box) -> None:
        universe, part = divmod(sample, self._parts**3)
        place = np.unravel_index(part, 3 * (self._parts,))
        corner = [0, *(self._side * int(i) for i in place)]
        start, stop = (
            tuple(a + c for a, c in zip(ends, corner, strict=True))
            for ends in (box.start, box.stop)
        )
        self._whole.read_into(out, universe, dc.Box(start, stop))

    def facts(self) -> dict[str, str]:
        """Return the file and the number of parts, which ranks compare."""
        return self._whole.facts() | {f"parts of {self.name}": str(self._parts)}


class Repeated(Source):
    """Samples that are each repeated several times in a row."""

    def __init__(self, once: Source, times: int) -> None:
        self._once, self._times = once, times
        self.name, self.shape, self.dtype = once.name, once.shape, once.dtype
        self.samples = once.samples * times

    def read_into(self, out: Array, sample: int, box: dc.Box) -> None:
        self._once.read_into(out, sample // self._times, box)

    def facts(self) -> dict[str, str]:
        """Return the name of the file, which ranks compare."""
        return self._once.facts()


def place_in_range(block: Tensor, box: dc.Box) -> Tensor:
    """Scale parameters (samples, 4) from their ranges to -1 to 1, in place."""
    low, high = torch.tensor(list(RANGES.values()), dtype=block.dtype)[box.slices[1]].unbind(1)
    return block.sub_(low).mul_(2.0 / (high - low)).sub_(1.0)


def from_range(places: np.ndarray) -> np.ndarray:
    """Return the parameters (samples, 4) from their places in their ranges, -1 to 1."""
    low, high = np.array(list(RANGES.values())).T
    return low + (places + 1.0) / 2.0 * (high - low)


def _check(path: Path, density: Source, parameters: Source, parts: int) -> None:
    """Raise `ValueError` for files of other contents, and `parts` that do not divide the side."""
    shape = density.shape
    if len(shape) != 4 or len(set(shape[1:])) != 1 or parameters.shape != (len(RANGES),):
        raise ValueError(
            f"{path}: samples of 'density' have shape {shape} and of 'parameters' "
            f"{parameters.shape}; expected (4, W, W, W) and ({len(RANGES)},)"
        )
    if shape[1] % parts:
        raise ValueError(
            f"{path}: {parts} parts do not divide a side of {shape[1]} cells; choose a power of two"
        )
