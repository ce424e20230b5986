"""Mesh states from an HDF5 file with the layout of `store`, every rank reading its own box."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch

import distconv as dc
from distconv.data.errors import check_alike

from . import store

LIMIT = 5.0
"""Normalised states are clipped to this many deviations: a zone that has folded over can be
hundreds of them away, and would dominate a batch norm's statistics."""


class MeshTanglingData(dc.data.Dataset):
    """The samples of one file: normalised states (batch, 18, S, S), and targets (batch, 1, S, S)
    that are 1 where the mesh tangles and 0 elsewhere. Opening it is collective.

    Args:
        path: the HDF5 file; every rank of the grid opens it.
        grid: the process grid; its axes of the same name cut the dimensions of a mini-batch.
        dtype: the type of the tensors.
        normalise_as: data whose mean and deviation of each channel are used: normalise a validation
            set as its training set.

    Attributes:
        size: zones along each side of the mesh.

    Raises:
        DataError: on every rank, for a file that is missing, truncated or mis-shaped on any, or
            is not the same on all.
    """

    def __init__(
        self,
        path: str | Path,
        grid: dc.ProcessGrid,
        dtype: torch.dtype = torch.float32,
        normalise_as: MeshTanglingData | None = None,
    ) -> None:
        self.path, self.dtype = Path(path), dtype
        found = dc.data.together(grid, lambda: store.describe(self.path))
        digest = hashlib.sha256(found.mean.tobytes() + found.deviation.tobytes()).hexdigest()[:16]
        facts = {f"checksum of the statistics of {self.path.name}": digest}
        check_alike(grid, facts, f"Give all ranks the same {self.path.name}.")
        self.size = found.size
        own = dc.data.Normalize(found.mean, found.deviation, LIMIT)
        self.normalize: dc.data.Normalize = normalise_as.normalize if normalise_as else own
        super().__init__(
            self.path,
            grid,
            inputs="state",
            targets="tangled",
            dtype={"state": dtype, "tangled": dtype},
            transform={"state": self.normalize},
        )

    def channel(self, sample: int, name: str) -> np.ndarray:
        """Return one channel of one state, whole and in its own units: (S, S). Not collective."""
        channel = list(store.CHANNELS).index(name)
        state = self.fields["state"]
        values = np.empty((1, self.size, self.size), state.dtype)
        state.read_into(values, sample, dc.Box((channel, 0, 0), (channel + 1, *values.shape[1:])))
        return values[0]
