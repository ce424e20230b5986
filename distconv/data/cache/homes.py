"""The part of the grid that keeps each sample: the same on all ranks, without a message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

from distconv.geometry.layout import owning_part
from distconv.geometry.topology import Topology

Axes: TypeAlias = tuple[str, ...]


@dataclass
class Arrivals:
    """Samples that no rank kept before a mini-batch.

    Attributes
    ----------
    parts: by grid axes that cut samples, each new sample and the part that is to keep it.
    """

    parts: dict[Axes, list[tuple[int, int]]] = field(default_factory=dict)


class Homes:
    """The part of the grid that keeps each sample: the part that has it in its first mini-batch.

    All ranks plan and settle the same arrivals in the same order.

    Parameters
    ----------
    topology: the topology of the grid.
    axes: for each field, the grid axes over which samples are cut.
    """

    def __init__(self, topology: Topology, axes: Iterable[Axes]) -> None:
        self._topology = topology
        self._parts: dict[Axes, dict[int, int]] = {own: {} for own in axes}

    def part(self, axes: Axes, sample: int) -> int:
        """Return the part that keeps a sample."""
        return self._parts[axes][sample]

    def kept(self, axes: Axes, part: int) -> int:
        """Return the number of samples that a part keeps."""
        return sum(own == part for own in self._parts[axes].values())

    def plan(self, batches: Sequence[Sequence[int]], others: Iterable[int] = ()) -> list[Arrivals]:
        """Return the samples of each mini-batch that no part keeps yet.

        Parameters
        ----------
        others: samples of later mini-batches. Those that no part keeps come with the last
            mini-batch, spread over the parts.
        """
        arrivals = [Arrivals() for _ in batches]
        for axes, parts in self._parts.items():
            count = self._topology.parts(axes)
            known = set(parts)
            for batch, own in zip(batches, arrivals, strict=True):
                new = own.parts[axes] = []
                for place, sample in enumerate(batch):
                    if sample not in known:
                        known.add(sample)
                        new.append((sample, owning_part(len(batch), count, place)))
            if arrivals:
                missing = [sample for sample in others if sample not in known]
                arrivals[-1].parts[axes] += [(s, i % count) for i, s in enumerate(missing)]
        return arrivals

    def settle(self, arrivals: Arrivals) -> set[tuple[Axes, int]]:
        """Record that samples are kept where planned; return the parts that keep new ones."""
        new = set()
        for axes, samples in arrivals.parts.items():
            for sample, part in samples:
                if sample not in self._parts[axes]:
                    self._parts[axes][sample] = part
                    new.add((axes, sample))
        return new

    def after(self, axes: Axes, part: int, arrivals: Iterable[Arrivals]) -> int:
        """Return the number of samples that a part keeps once all the arrivals are settled."""
        coming = chain.from_iterable(own.parts[axes] for own in arrivals)
        new = {s for s, home in coming if home == part and s not in self._parts[axes]}
        return self.kept(axes, part) + len(new)
