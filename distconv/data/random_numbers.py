"""The states of the random numbers of torch, numpy and Python, as plain values."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch

States: TypeAlias = list[Any]
"""The states of the random numbers of torch, numpy and Python, and of generators, in this order."""


def states_of(generators: Sequence[torch.Generator] = ()) -> States:
    """Return the states of the random number generators of this process, and of `generators`."""
    return [get() for get, _ in _sources(generators)]


def set_states(states: States, generators: Sequence[torch.Generator] = ()) -> None:
    """Set the states of the random number generators of this process, and of `generators`."""
    for (_, put), state in zip(_sources(generators), states, strict=True):
        put(state)


@contextmanager
def drawn_from(states: States, generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Draw random numbers from `states`, such as rank 0's, in the block of a `with` statement.

    At the end of the block, a generator of this process whose own state was equal to the one in
    `states` continues from where the block left it, as in a serial program; any other generator of
    this process returns to its own state. `generators` stay where the block left them.
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
    """Return pairs of functions that get and set the state of each random number generator."""
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
