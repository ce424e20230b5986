"""A model of the time that messages and reductions take between GPUs that are not there.

A message of n bytes takes a + n / b over a link of latency a and bandwidth b; the messages of an
exchange, one after another. A reduction of n bytes over p ranks takes the less of

    log2(p) (a + n / b)                     recursive doubling
    2 log2(p) a + 2 (p - 1) / p n / b       reduce-scatter and all-gather

over the slowest link between them: Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH" (2005), without the additions. An all-gather is counted as one.

Bandwidths are what makers publish, each way. Latencies are assumptions: from the end of the kernel
that packs to the start of the one that uses what has arrived. Nobody else uses the links.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, log2
from typing import NamedTuple

from distconv.planning.dry_run import Traffic


class Link(NamedTuple):
    """A connection between two GPUs."""

    latency: float
    """Seconds."""
    bandwidth: float
    """Bytes a second, each way."""

    def seconds(self, size: float) -> float:
        """Return the seconds that a message of `size` bytes takes."""
        return self.latency + size / self.bandwidth


class Machine(NamedTuple):
    """Nodes of several GPUs; consecutive ranks share a node."""

    name: str
    gpus: int
    """GPUs of a node."""
    inside: Link
    between: Link

    def link(self, rank: int, peer: int) -> Link:
        """Return the link between two ranks."""
        return self.inside if rank // self.gpus == peer // self.gpus else self.between

    def seconds(self, rank: int, traffic: Traffic) -> float:
        """Return the seconds of an exchange or reduction that `rank` takes part in."""
        links = [(self.link(rank, peer), size) for peer, size in traffic.messages]
        if not traffic.collective:
            return sum(link.seconds(size) for link, size in links)
        if not links:
            return 0.0
        slowest, size = max(links, key=lambda pair: pair[0].seconds(pair[1]))
        ranks = len(links) + 1
        steps = ceil(log2(ranks))
        scattered = 2 * (ranks - 1) / ranks * size / slowest.bandwidth
        return min(steps * slowest.seconds(size), 2 * steps * slowest.latency + scattered)

    def total(self, rank: int, traffic: Iterable[Traffic]) -> float:
        """Return the seconds of several exchanges and reductions, one after another."""
        return sum(self.seconds(rank, each) for each in traffic)


MACHINES = (
    # NVIDIA H200 data sheet: NVLink 900 GB/s, both ways together. DGX H200: a ConnectX-7 of
    # 400 Gb/s for each GPU.
    Machine("NVLink in nodes of 8, NDR InfiniBand", 8, Link(5e-6, 450e9), Link(10e-6, 50e9)),
    # The published runs had nodes of four V100; that they were POWER9 machines is an assumption.
    # NVIDIA V100 data sheet: NVLink 300 GB/s, both ways together; there half of the links go to the
    # GPU beside it, which is taken for all of a node. Four share two EDR ports of 100 Gb/s.
    Machine("NVLink 2 in nodes of 4, EDR InfiniBand", 4, Link(10e-6, 75e9), Link(15e-6, 6.25e9)),
)
