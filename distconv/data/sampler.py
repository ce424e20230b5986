"""The sample numbers of each mini-batch: the same on all ranks, and on any grid."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from zlib import crc32

import numpy as np


class Sampler:
    """The mini-batches of each epoch, in order or shuffled. No communication.

    All ranks find the same sample numbers; a rank reads the block of them that its coordinate along
    the `sample` axis selects.

    Parameters
    ----------
    samples: the number of samples.
    batch_size: samples of a mini-batch, over all ranks.
    shuffle: whether each epoch has an order of its own.
    drop_last: whether samples that do not fill a mini-batch are left out of the epoch. Otherwise
        the last mini-batch is smaller.
    seed: the seed of the shuffling.

    Raises
    ------
    ValueError If there would be no mini-batch.
    """

    def __init__(
        self,
        samples: int,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        if batch_size < 1 or samples < 1:
            raise ValueError(
                f"batch_size={batch_size} of {samples} samples is no mini-batch; choose 1 or more"
            )
        if drop_last and batch_size > samples:
            raise ValueError(
                f"batch_size={batch_size} is larger than the {samples} samples, and drop_last "
                f"leaves none; choose at most {samples}"
            )
        if seed < 0:
            raise ValueError(f"seed={seed} is negative; choose 0 or more")
        self.samples, self.batch_size = samples, batch_size
        self.shuffle, self.drop_last, self.seed = shuffle, drop_last, seed

    def __len__(self) -> int:
        """Return the number of mini-batches of an epoch."""
        full, rest = divmod(self.samples, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def batches(self, epoch: int) -> list[list[int]]:
        """Return the sample numbers of every mini-batch of an epoch; epochs count from 0."""
        order = np.arange(self.samples)
        if self.shuffle:
            order = np.random.default_rng((self.seed, epoch)).permutation(self.samples)
        size = self.batch_size
        return [order[i * size : (i + 1) * size].tolist() for i in range(len(self))]

    def description(self) -> dict[str, Any]:
        """Return the arguments that determine the mini-batches, by name, for ranks to compare."""
        return dict(vars(self))


class FixedBatches:
    """A sampler with the same mini-batches in every epoch, in place of a `Sampler`.

    `batches` are the sample numbers of each mini-batch.
    """

    def __init__(self, batches: Iterable[Sequence[int]]) -> None:
        self._batches = [list(map(int, batch)) for batch in batches]

    def __len__(self) -> int:
        return len(self._batches)

    def batches(self, epoch: int) -> list[list[int]]:
        """Return the sample numbers of every mini-batch, the same for any epoch."""
        return self._batches

    def description(self) -> dict[str, Any]:
        """Return a checksum of the mini-batches, for ranks to compare."""
        return {"batches": crc32(repr(self._batches).encode())}
