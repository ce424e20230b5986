"""What one rank does in a training step, in order, and the memory that it takes.

`recorded_step` makes it by a dry run; `timeline` puts it into time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from distconv.planning.local_operators import LocalOperator

PHASES = ("forward", "backward", "optimizer")

KINDS = ("parameters", "gradients", "optimizer state", "activations", "halos", "other")
"""The kinds of memory. Halos are what messages arrive in and leave from; others are inputs, and
results that live for a moment."""


class Place(NamedTuple):
    """Where in a step something happens."""

    layer: str
    """The name of the module, as `named_modules` has it; of a loss and of what follows the backward
    pass, their own."""
    phase: str
    """One of `PHASES`."""


class Compute(NamedTuple):
    """A local operator runs."""

    operator: LocalOperator
    place: Place
    live: int = 0
    """Bytes that the rank holds when it has run."""


class HostWork(NamedTuple):
    """The host goes through a function of torch on distributed tensors, or back through it.

    Of a parameter's gradient and update the name is `parameter`.
    """

    function: str
    place: Place
    streamed: int = 0
    """Bytes that operators have taken and made since the function before."""


class Start(NamedTuple):
    """Messages leave, or a reduction begins."""

    number: int
    collective: str | None
    """`all_reduce` or `all_gather`; None for messages."""
    arriving: tuple[tuple[int, int], ...]
    """Other ranks, and the bytes that each of them sends; in a collective each contributes them."""
    leaving: tuple[tuple[int, int], ...]
    place: Place


class Wait(NamedTuple):
    """The rank waits for what has started under a number."""

    number: int
    place: Place


Event: TypeAlias = Compute | HostWork | Start | Wait


@dataclass(frozen=True)
class Recording:
    """A training step as one rank sees it."""

    rank: int
    ranks: int
    events: tuple[Event, ...]
    memory: dict[str, int]
    """Bytes of each of `KINDS` at the moment when the rank holds the most."""
    kept: dict[str, int]
    """Bytes that each layer keeps for the backward pass."""
    layers: dict[str, str]
    """The layers in order, each with its type."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The shape of this rank's block of each layer's output."""

    @property
    def peak(self) -> int:
        """Return the most bytes that the rank holds in a step."""
        return sum(self.memory.values())

    @property
    def operators(self) -> Counter[LocalOperator]:
        """Return each local operator with how often it runs."""
        return Counter(e.operator for e in self.events if isinstance(e, Compute))
