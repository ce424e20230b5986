"""A training step of a whole network: how long it takes, beside what, and where it loses time.

The bound is the best plain torch on a block of the same shape, all ranks at once and without
communication. From one variant of the step to the next one thing is left out, so that the
differences add up to the loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measuring.memory import memory
from benchmarks.measuring.network import Network, cut_sample, sample, sgd_step
from benchmarks.measuring.plain import best, plain_forms
from benchmarks.measuring.report import Row, over, share, speedup
from benchmarks.measuring.settings import Settings, by
from benchmarks.measuring.turns import alternate
from distconv.grid.communicators import carried_by
from distconv.grid.journal import WrappedTransport
from distconv.grid.process_grid import ProcessGrid
from distconv.model.parallelize import parallelize
from distconv.planning.scaling import Contender
from distconv.tensor.dist_tensor import local_box
from distconv.transport.interface import Message, Request, Transport
from distconv.transport.launch import mpi

Step = Callable[[], None]

PARTS = (
    "halos and redistributions: messages and waiting",
    "reductions and gathers: messages and waiting",
    "other work of a cut network",
    "Python and kernels of one rank",
)
"""What is left out of the step, one after the other, until plain torch remains."""

OVER_PLAIN = "over the best plain torch on the block"
OVER_DEFAULT = "over torch by default on the block"


def own_step(settings: Settings, network: Network) -> Iterator[Row]:
    """Yield all rows of a user's network; all ranks of MPI call it."""
    yield from step_rows("own", network, settings)
    yield from memory(settings, [network])


def step_rows(name: str, network: Network, settings: Settings) -> Iterator[Row]:
    """Yield how long a step takes over plain torch, the parts that add up to its loss, and how long
    it takes compiled and over serial torch, as rows of the benchmark `name`; all ranks of MPI call
    it.

    Serial torch has as many threads as all ranks together, and runs on rank 0 while the others
    sleep.
    """
    grid = settings.grid(len(network.shape))
    torch.manual_seed(0)
    block = tuple(local_box(network.shape, grid).shape)
    on_block = network._replace(shape=block)
    cut = distributed(network, grid)
    alone = distributed(on_block, ProcessGrid(mpi().COMM_SELF, device="cpu"))
    variants = [cut, silenced(cut, collectives=False), silenced(cut, collectives=True), alone]
    compiled = distributed(network, grid, compiled=True)
    for _ in range(3):
        compiled()
    plain, serial = (
        plain_forms(
            partial(with_fixed_statistics, shaped),
            sample(network, shaped.shape),
            partial(sgd_step, network, rate=0.0),
        ).values()
        for shaped in (on_block, network)
    )
    threads = settings.threads * grid.size
    sides = [Contender(run, settings.threads) for run in (*variants, compiled, *plain)]
    sides += [Contender(run, threads, ranks=1) for run in serial]
    times = iter(alternate(grid.comm, sides, 3 * settings.seconds))
    of_variants, [of_compiled], of_plain, of_serial = (
        list(islice(times, n)) for n in (len(variants), 1, len(plain), len(serial))
    )
    bound = best(of_plain)
    where = *network.remarks, by(network.shape), f"{by(block)} on rank 0"
    row = name, network.name, settings.configuration(grid, *where)
    yield over(row, OVER_PLAIN, of_variants[0], bound, network.over_plain)
    yield over(row, OVER_DEFAULT, of_variants[0], of_plain[0], None)
    for part, (having, lacking) in zip(PARTS, pairwise([*of_variants, bound]), strict=True):
        yield share(row, part, having, lacking, bound)
    yield over(row, f"compiled step, {OVER_PLAIN}", of_compiled, bound, network.over_plain)
    measure = f"speed-up over the best serial torch, {threads} threads"
    yield speedup(row, measure, of_variants[0], best(of_serial), 1.0)


def distributed(network: Network, grid: ProcessGrid, compiled: bool = False) -> Step:
    """Return a step of a network on a grid that computes everything and changes no parameter.

    All ranks of the grid call it. Without sums, ranks that change would drift apart, which a
    parallelized module treats as an error.
    """
    module = parallelize(with_fixed_statistics(network), grid)
    return sgd_step(network, module, *cut_sample(network, grid), rate=0.0, compiled=compiled)


def with_fixed_statistics(network: Network) -> nn.Module:
    """Return the network for its sample's shape, with running statistics that stay as they are."""
    module = network.make(network.shape[2:])
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d | nn.BatchNorm3d):
            part.momentum = 0.0
    return module


class _Nothing:
    """A request that is complete."""

    def wait(self) -> None:
        """Return at once."""


class SilentTransport(WrappedTransport):
    """Leave out the messages between neighbours, or reductions and gathers too; see `Transport`.

    What should have arrived is zero, sums are this rank's part, and all ranks are taken to have
    what this one has: the numbers are wrong, and the work of the host and the kernels is the same.
    """

    def __init__(self, carrier: Transport, collectives: bool):
        super().__init__(carrier)
        self._collectives = collectives

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        """Let zeros arrive."""
        for _, tensor in arriving:
            tensor.zero_()
        return _Nothing()

    def all_reduce(self, tensor: Tensor, group: Any) -> Request:
        """Add up as the carrier does, or take this rank's part for the sum."""
        return _Nothing() if self._collectives else self.carrier.all_reduce(tensor, group)

    def all_gather(self, tensor: Tensor, group: Any) -> Tensor:
        """Gather as the carrier does, or take this rank's tensor for those of all."""
        if not self._collectives:
            return self.carrier.all_gather(tensor, group)
        return torch.stack([tensor] * group.size)

    def broadcast(self, tensor: Tensor, group: Any) -> None:
        """Broadcast as the carrier does."""
        self.carrier.broadcast(tensor, group)


def silenced(step: Step, collectives: bool) -> Step:
    """Return a step that sends no halos, or nothing at all."""

    def run() -> None:
        with carried_by(lambda transport: SilentTransport(transport.carrier, collectives)):
            with warnings.catch_warnings():
                # Sums of one rank alone look like gradients that the others lack.
                warnings.simplefilter("ignore")
                step()

    return run
