"""A training step of a whole network: how long it takes, beside what, and where it loses time.

The bound is the best plain torch on a block of the same shape, all ranks at once and without
communication. From one variant of the step to the next one thing is left out, so that the
differences add up to the loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.measuring.memory import memory
from benchmarks.measuring.network import Network, cut_sample, sample, sgd_step
from benchmarks.measuring.plain import best, plain_forms
from benchmarks.measuring.report import Row, over, share, speedup
from benchmarks.measuring.settings import Settings, by
from benchmarks.measuring.silent import SilentTransport
from benchmarks.measuring.turns import alternate
from distconv.grid.communicators import carried_by
from distconv.grid.process_grid import ProcessGrid
from distconv.model.parallelize import parallelize
from distconv.planning.timing import Contender
from distconv.tensor.dist_tensor import local_box
from distconv.transport.launch import mpi

Step = Callable[[], None]

HALOS = "halos and redistributions: messages and waiting"
REDUCTIONS = "reductions and gathers: messages and waiting"
CUT = "other work of a cut network"
ONE_RANK = "Python and kernels of one rank"

COMPILED = "compiled step"
OVER_PLAIN = "over the best plain torch on the block"
OVER_DEFAULT = "over torch by default on the block"


class Variants(NamedTuple):
    """A step, and the same with less and less of it, down to plain torch."""

    cut: Step
    """The step as it is; what is left out of it first is in the first of `without`."""
    without: Mapping[str, Step]
    """By the name of what the step before has and this one has not, the steps that follow."""
    plain: Mapping[str, Step]
    """By their names, the forms of plain torch on the block."""


def variants(network: Network, grid: ProcessGrid) -> Variants:
    """Return the training step of a network taken apart; all ranks of the grid call it."""
    alone = ProcessGrid(mpi().COMM_SELF, device="cpu")
    torch.manual_seed(0)
    block = tuple(local_box(network.shape, grid).shape)
    on_block = network._replace(shape=block)
    cut = unchanging_step(
        network, parallelize(with_fixed_statistics(network), grid), *cut_sample(network, grid)
    )
    of_one_rank = unchanging_step(
        network, parallelize(with_fixed_statistics(on_block), alone), *cut_sample(on_block, alone)
    )
    without = {
        HALOS: silenced(cut, collectives=False),
        REDUCTIONS: silenced(cut, collectives=True),
        CUT: of_one_rank,
    }

    plain = plain_forms(
        partial(with_fixed_statistics, on_block),
        sample(network, block),
        partial(unchanging_step, network),
    )
    return Variants(cut, without, plain)


def loss_rows(
    name: str, network: Network, grid: ProcessGrid, apart: Variants, settings: Settings
) -> Iterator[Row]:
    """Yield how long a step takes over plain torch, and the parts that add up to its loss.

    All ranks call it.

    Parameters
    ----------
    name: of the benchmark, for the rows.
    """
    runs = [apart.cut, *apart.without.values(), *apart.plain.values()]
    sides = [Contender(run, settings.threads) for run in runs]
    times = alternate(grid.comm, sides, settings.seconds)
    of_cut, of_plain = times[: 1 + len(apart.without)], times[1 + len(apart.without) :]
    bound = best(of_plain)
    block = by(local_box(network.shape, grid).shape)
    where = *network.remarks, by(network.shape), f"{block} on rank 0"
    row = name, network.name, settings.configuration(grid, *where)
    yield over(row, OVER_PLAIN, times[0], bound, network.over_plain)
    yield over(row, OVER_DEFAULT, times[0], of_plain[0], None)
    parts = [*apart.without, ONE_RANK]
    for part, with_it, without in zip(parts, of_cut, [*of_cut[1:], bound], strict=True):
        yield share(row, part, with_it, without, bound)


def replayed(name: str, network: Network, grid: ProcessGrid, settings: Settings) -> Iterator[Row]:
    """Yield how long a compiled step takes over the best plain torch; all ranks call it."""
    block = tuple(local_box(network.shape, grid).shape)
    on_block = network._replace(shape=block)
    torch.manual_seed(0)
    module = parallelize(with_fixed_statistics(network), grid)
    cut = sgd_step(network, module, *cut_sample(network, grid), rate=0.0, compiled=True)
    plain = plain_forms(
        partial(with_fixed_statistics, on_block),
        sample(network, block),
        partial(unchanging_step, network),
    ).values()
    for _ in range(3):
        cut()
    sides = [Contender(run, settings.threads) for run in (cut, *plain)]
    times = alternate(grid.comm, sides, settings.seconds)
    row = name, network.name, settings.configuration(grid, *network.remarks, by(network.shape))
    yield over(row, f"{COMPILED}, {OVER_PLAIN}", times[0], best(times[1:]), network.over_plain)


def own_step(settings: Settings, network: Network) -> Iterator[Row]:
    """Yield all rows of a user's network; all ranks of MPI call it."""
    grid = settings.grid(len(network.shape))
    yield from loss_rows("own", network, grid, variants(network, grid), settings)
    yield from replayed("own", network, grid, settings)
    yield from against_serial("own", network, grid, settings)
    yield from memory(settings, [network])


def against_serial(
    name: str, network: Network, grid: ProcessGrid, settings: Settings
) -> Iterator[Row]:
    """Yield how many times as fast as serial torch a step is; all ranks call it.

    Serial torch has as many threads as all ranks together, and runs on rank 0 while the others
    sleep.
    """
    torch.manual_seed(0)
    make = partial(network.make, network.shape[2:])
    cut = sgd_step(network, parallelize(make(), grid), *cut_sample(network, grid))
    whole = sample(network, network.shape)
    serial = plain_forms(make, whole, partial(sgd_step, network)).values()
    threads = settings.threads * grid.size
    sides = [Contender(cut, settings.threads), *(Contender(s, threads, ranks=1) for s in serial)]
    times = alternate(grid.comm, sides, settings.seconds)
    row = name, network.name, settings.configuration(grid, *network.remarks, by(network.shape))
    measure = f"speed-up over the best serial torch, {threads} threads"
    yield speedup(row, measure, times[0], best(times[1:]), 1.0)


def with_fixed_statistics(network: Network) -> nn.Module:
    """Return the network for its sample's shape, with running statistics that stay as they are."""
    module = network.make(network.shape[2:])
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d | nn.BatchNorm3d):
            part.momentum = 0.0
    return module


def unchanging_step(network: Network, module: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Return a step that computes everything and changes nothing: without sums, ranks would drift
    apart, which a parallelized module takes for an error."""
    return sgd_step(network, module, x, y, rate=0.0)


def silenced(step: Step, collectives: bool) -> Step:
    """Return a step that sends no halos, or nothing at all."""

    def run() -> None:
        with carried_by(lambda transport: SilentTransport(transport.carrier, collectives)):
            with warnings.catch_warnings():
                # Sums of one rank alone look like gradients that the others lack.
                warnings.simplefilter("ignore")
                step()

    return run
