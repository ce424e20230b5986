"""Mesh states from an HDF5 file laid out as `store`, every rank reading its own box."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

import distconv as dc

from .prefetch import prefetched
from .source import SampleFile
from .store import CHANNELS
from .together import check_alike, in_step, together

LIMIT = 5.0
"""Normalised states are clipped to this many deviations: a zone that has folded over can be
hundreds of them away, and would drown all others in a batch norm's statistics."""

Batch = tuple[dc.DistTensor, dc.DistTensor]


class MeshTanglingData:
    """The samples of one file, as distributed mini-batches. Opening it is collective.

    Args:
        path: the HDF5 file; every rank of the grid opens it.
        grid: the process grid; its axes of the same name cut the dimensions of a mini-batch.
        dtype: the type of the tensors that `batches` yields.
        normalise_as: take the mean and deviation of each channel from these data. A validation
            set has to be normalised as its training set was.

    Attributes:
        samples: number of samples in the file.
        size: zones along each side of the mesh.
        checksummed: whether the file has checksums, so that damage is noticed when it is read.
        bytes_read: bytes this rank has read of states and targets so far.

    Raises:
        InvalidInput: on every rank, for a file that is missing, truncated or mis-shaped on any,
            or is not the same on all.
    """

    def __init__(
        self,
        path: str | Path,
        grid: dc.ProcessGrid,
        dtype: torch.dtype = torch.float32,
        normalise_as: MeshTanglingData | None = None,
    ) -> None:
        self.path = Path(path)
        self.grid = grid
        self.dtype = dtype
        self.bytes_read = 0
        self._file = together(grid.comm, lambda: SampleFile(self.path))
        facts = together(grid.comm, self._file.facts)
        check_alike(grid.comm, facts, f"Give all ranks the same {self.path.name}.")
        self.samples, self.size = self._file.samples, self._file.size
        self.checksummed = self._file.checksummed
        statistics = normalise_as._file if normalise_as else self._file
        self._mean = _per_channel(statistics.mean, dtype)
        self._deviation = _per_channel(statistics.deviation, dtype)

    def batches(self, samples_of_batches: Iterable[Sequence[int]]) -> Iterator[Batch]:
        """Yield a mini-batch for every sequence of sample numbers, reading ahead. Collective.

        Yields (states, targets): normalised states (batch, 18, S, S), and targets
        (batch, 1, S, S) that are 1 where the mesh tangles and 0 elsewhere. All ranks must ask for
        the same samples in the same order; each reads its own box and nothing else.

        Raises:
            InvalidInput: on every rank, where ranks ask for different samples, or one cannot read
                its box.
        """

        def read(samples: Sequence[int]) -> tuple[str, tuple[torch.Tensor, torch.Tensor]]:
            return f"samples {list(map(int, samples))}", self._read(samples)

        read_ahead = prefetched(read, samples_of_batches)
        for states, targets in in_step(self.grid.comm, read_ahead):
            yield (
                dc.DistTensor.from_local(states, self.grid),
                dc.DistTensor.from_local(targets, self.grid),
            )

    def channel(self, sample: int, name: str) -> np.ndarray:
        """Return one channel of one state, whole and as it is in the file: (S, S). Not
        collective.
        """
        channel = [channel.name for channel in CHANNELS].index(name)
        values = np.empty((1, 1, self.size, self.size), self._file.dtype("state"))
        self._file.read_into(values, 0, "state", sample, (slice(channel, channel + 1),))
        return values[0, 0]

    def _read(self, samples: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's box of the states, normalised, and of the targets."""
        states, box = self._read_box("state", samples)
        channels = box.slices[1]
        states.sub_(self._mean[channels]).div_(self._deviation[channels]).clamp_(-LIMIT, LIMIT)
        targets, _ = self._read_box("tangled", samples)
        return states, targets

    def _read_box(self, name: str, samples: Sequence[int]) -> tuple[torch.Tensor, dc.Box]:
        """Return this rank's box of some samples of a dataset."""
        box = dc.local_box((len(samples), *self._file.shape(name)[1:]), self.grid)
        in_batch, *in_sample = box.slices
        values = np.empty(box.shape, self._file.dtype(name))
        # One by one: the order is shuffled, and HDF5 selects in increasing order only.
        for place, sample in enumerate(samples[in_batch] if values.size else ()):
            self._file.read_into(values, place, name, sample, tuple(in_sample))
        self.bytes_read += values.nbytes
        return torch.from_numpy(values).to(self.dtype), box


def check_batch_size(batch_size: int, data: MeshTanglingData) -> None:
    """Raise `ValueError` unless `data` can be trained on in mini-batches of this size."""
    if batch_size > data.samples:
        raise ValueError(
            f"batch size {batch_size} is larger than the {data.samples} samples of {data.path}; "
            f"choose at most {data.samples}, or generate more samples"
        )
    parts = data.grid.shape["sample"]
    if batch_size < parts:
        raise ValueError(
            f"batch size {batch_size} leaves some of the sample={parts} parts of the grid without "
            f"a sample; choose at least {parts}, or cut over fewer samples and more rows or columns"
        )


def shuffled_batches(samples: int, batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the sample numbers of every training mini-batch of an epoch.

    They follow from the arguments alone, so they are the same on all ranks and on any grid, and
    an epoch can be repeated after an interruption. All mini-batches are full: the samples left
    over sit out this epoch.
    """
    order = np.random.default_rng((seed, epoch)).permutation(samples)
    batches = samples // batch_size
    return order[: batches * batch_size].reshape(batches, batch_size).tolist()


def ordered_batches(samples: int, batch_size: int) -> list[list[int]]:
    """Return the sample numbers of every validation mini-batch: each sample exactly once, in order.

    The last mini-batch is smaller if need be.
    """
    return [
        list(range(start, min(start + batch_size, samples)))
        for start in range(0, samples, batch_size)
    ]


def _per_channel(statistic: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Return a statistic of every channel as (18, 1, 1), to be applied to (samples, 18, S, S)."""
    return torch.from_numpy(statistic).to(dtype).reshape(-1, 1, 1)
