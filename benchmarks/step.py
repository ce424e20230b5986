"""Where a training step loses time to being cut: `own` with finer parts, and a rival.

Between the parts that users see, more is left out by replacing functions of the library
(`left_out`). The rival is written by hand for the network: halos by mpi4py and `torch.cat`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks import left_out
from benchmarks.by_hand import BY_HAND, by_hand, with_sums
from benchmarks.measuring.network import Network, cut_sample, sample
from benchmarks.measuring.own_step import (
    CUT,
    HALOS,
    REDUCTIONS,
    Step,
    Variants,
    against_serial,
    loss_rows,
    replayed,
    silenced,
    unchanging_step,
    variants,
    with_fixed_statistics,
)
from benchmarks.measuring.plain import best, plain_forms
from benchmarks.measuring.report import Row, over
from benchmarks.measuring.settings import Settings, by
from benchmarks.measuring.turns import alternate
from benchmarks.networks import NETWORKS
from distconv.grid.process_grid import ProcessGrid
from distconv.planning.timing import Contender
from distconv.tensor.dist_tensor import local_box

NORM = "batch norm over all ranks"
BOUNDARIES = "boundaries of overlapped convolutions"
BUCKETS = "hooks and buckets of parameters"


def steps(settings: Settings, networks: Sequence[Network] = NETWORKS) -> Iterator[Row]:
    """Yield for each network its loss, the parts that add up to it, and how it compares with serial
    torch; all ranks of MPI call it."""
    for network in networks:
        grid = settings.grid(len(network.shape))
        yield from loss_rows("step", network, grid, finer(network, grid), settings)
        yield from replayed("step", network, grid, settings)
        yield from rivals(network, grid, settings)
        yield from against_serial("step", network, grid, settings)


def rivals(network: Network, grid: ProcessGrid, settings: Settings) -> Iterator[Row]:
    """Yield how long a step takes that is written by hand, where it can be; all ranks call it."""
    block = tuple(local_box(network.shape, grid).shape)
    on_block = network._replace(shape=block)

    def step_by_hand(module: nn.Module, *tensors: Tensor) -> Step:
        return with_sums(module, unchanging_step(network, module, *tensors))

    torch.manual_seed(0)
    tensors = sample(network, block)
    try:
        hand = plain_forms(
            lambda: by_hand(with_fixed_statistics(network)), tensors, step_by_hand
        ).values()
    except NotImplementedError:
        return
    plain = plain_forms(
        lambda: with_fixed_statistics(on_block), tensors, partial(unchanging_step, network)
    ).values()
    sides = [Contender(run, settings.threads) for run in (*hand, *plain)]
    times = alternate(grid.comm, sides, settings.seconds)
    row = "step", network.name, settings.configuration(grid, *network.remarks, by(network.shape))
    yield over(row, BY_HAND, best(times[: len(hand)]), best(times[len(hand) :]), None)


def finer(network: Network, grid: ProcessGrid) -> Variants:
    """Return the training step of a network taken apart, in more parts; all ranks call it."""
    coarse = variants(network, grid)
    norm, boundaries = left_out.statistics_of_all_ranks(), left_out.boundaries()
    in_parts = left_out.sums_of_gradients(with_fixed_statistics(network), grid.size)
    without_sums = unchanging_step(network, in_parts, *cut_sample(network, grid))
    parts = {
        HALOS: coarse.without[HALOS],
        REDUCTIONS: coarse.without[REDUCTIONS],
        NORM: silenced(without(coarse.cut, norm), collectives=True),
        BOUNDARIES: silenced(without(coarse.cut, norm, boundaries), collectives=True),
        BUCKETS: silenced(without(without_sums, norm, boundaries), collectives=True),
        CUT: coarse.without[CUT],
    }
    return coarse._replace(without=parts)


def without(step: Step, *parts: AbstractContextManager[object]) -> Callable[[], None]:
    """Return a step of which parts are left out."""

    def run() -> None:
        with ExitStack() as stack:
            for part in parts:
                stack.enter_context(part)
            step()

    return run
