"""The sample numbers of each mini-batch: the same on all ranks, and on any grid."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np
import torch

# The states of the random number generators of this process, as values of built-in types.


States: TypeAlias = list[Any]
"""The states of torch's, NumPy's and Python's random number generators, and of further ones."""


def states_of(generators: Sequence[torch.Generator] = ()) -> States:
    """Return the states of torch's, NumPy's and Python's generators, then those of `generators`."""
    return [get() for get, _ in _sources(generators)]


def set_states(states: States, generators: Sequence[torch.Generator] = ()) -> None:
    """Set the states of torch's, NumPy's and Python's generators, and those of `generators`."""
    for (_, put), state in zip(_sources(generators), states, strict=True):
        put(state)


@contextmanager
def drawn_from(states: States, generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Draw random numbers from `states`, such as rank 0's, in the block of a `with` statement.

    At the end of the block, a global generator (torch's, NumPy's, Python's) whose state before the
    block was equal to its entry in `states` keeps its new state, as in a serial program. Any other
    global generator gets its former state back. `generators` keep their new states.
    """
    own = states_of()
    set_states(states, generators)
    try:
        yield
    finally:
        for (_, put), mine, others in zip(_sources(), own, states, strict=False):
            if mine != others:
                put(mine)


def _sources(
    generators: Sequence[torch.Generator] = (),
) -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Return the getter and setter of each state: torch's, NumPy's, Python's, of `generators`."""
    return [
        _of(torch.default_generator),
        (_numpy_state, np.random.set_state),
        (random.getstate, random.setstate),
        *map(_of, generators),
    ]


def _of(generator: torch.Generator) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    return (
        lambda: generator.get_state().tolist(),
        lambda state: generator.set_state(torch.tensor(state, dtype=torch.uint8)),
    )


def _numpy_state() -> Any:
    kind, keys, *rest = np.random.get_state()
    return (kind, np.asarray(keys).tolist(), *rest)


class Sampler:
    """The mini-batches of each epoch, in order or shuffled. No communication.

    All ranks compute the same sample numbers. A rank reads the block of these numbers at its
    coordinate along the `sample` axis.

    Parameters
    ----------
    samples: the number of samples.
    batch_size: samples of a mini-batch, over all ranks.
    shuffle: whether each epoch has a random order of samples.
    drop_last: whether samples that do not fill a mini-batch are left out of the epoch. Otherwise
        the last mini-batch is smaller.
    seed: the seed of the shuffling.

    Raises
    ------
    ValueError
        If an epoch would have no mini-batch.

    Examples
    --------
    >>> sampler = dc.data.Sampler(10, batch_size=4, shuffle=True)
    >>> sampler.batches(epoch=0)
    [[4, 6, 2, 7], [3, 5, 9, 0], [8, 1]]
    >>> sampler.batches(epoch=1)
    [[9, 1, 3, 8], [7, 6, 0, 4], [2, 5]]
    >>> sampler.description()
    {'samples': 10, 'batch_size': 4, 'shuffle': True, 'drop_last': False, 'seed': 0}
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
                f"batch_size={batch_size} of {samples} samples is not a mini-batch; choose 1 or "
                "more"
            )
        if drop_last and batch_size > samples:
            raise ValueError(
                f"batch_size={batch_size} is larger than the {samples} samples, so drop_last "
                f"leaves no mini-batch; choose at most {samples}"
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
    """A sampler that has the same given mini-batches in every epoch.

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
