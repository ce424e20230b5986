"""Which of torch's operators a cut network spends its loss in.

`mpiexec -n 2 python -m benchmarks.operators "residual, 32 channels, 128^2"` profiles three of the
steps that `benchmarks step` compares: the cut one without messages, the one of one rank, and torch
by default on a block of the same shape. It prints the operators and autograd functions in which
they differ most, with the time that each spends outside of others. The profiler makes all of them
slower, small ones most.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.measuring.network import Network
from benchmarks.measuring.own_step import CUT, REDUCTIONS, variants
from benchmarks.measuring.plain import DEFAULT
from benchmarks.measuring.settings import Settings
from benchmarks.networks import NETWORKS
from distconv.planning.table import table
from distconv.transport.launch import mpi

_WARM_UP = 8
"""Steps before the first that counts."""


def operators(network: Network, steps: int, rows: int) -> str:
    """Return the table of this rank's operators; all ranks of MPI call it.

    Parameters
    ----------
    steps: how many of each kind are profiled, in turns.
    rows: how many operators are named.
    """
    grid = Settings().grid(len(network.shape))
    apart = variants(network, grid)
    silent, on_one_rank = apart.without[REDUCTIONS], apart.without[CUT]
    runs = {"cut": silent, "one rank": on_one_rank, "plain": apart.plain[DEFAULT]}
    for run in runs.values():
        for _ in range(_WARM_UP):
            run()
    seconds: dict[str, defaultdict[str, float]] = {name: defaultdict(float) for name in runs}
    calls: dict[str, Counter[str]] = {name: Counter() for name in runs}
    for _ in range(steps):
        for name, run in runs.items():
            grid.comm.Barrier()
            for operator, microseconds in _profiled(run):
                seconds[name][operator] += microseconds
                calls[name][operator] += 1
    found = set().union(*seconds.values())
    ranked = sorted(found, key=lambda o: -abs(seconds["cut"][o] - seconds["plain"][o]))
    heads = ["operator", *(f"{name}, {what}" for name in runs for what in ("us", "calls"))]
    lines = [
        ["all", *(x for name in runs for x in (f"{sum(seconds[name].values()) / steps:.0f}", ""))]
    ]
    for operator in ranked[:rows]:
        cells = [operator]
        for name in runs:
            cells += [
                f"{seconds[name][operator] / steps:.0f}",
                f"{calls[name][operator] / steps:.0f}",
            ]
        lines.append(cells)
    return table([heads, *lines])


def _profiled(run: Callable[[], None]) -> list[tuple[str, float]]:
    """Return each operator that a step calls, with the microseconds that it spends outside of
    others."""
    with profile(activities=[ProfilerActivity.CPU]) as record:
        run()
    return [(event.name, event.self_cpu_time_total) for event in record.events() or ()]


def main() -> None:
    """Print the table of one network."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operators")
    names = {network.name: network for network in NETWORKS}
    parser.add_argument("network", choices=names)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=25)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shown = operators(names[arguments.network], arguments.steps, arguments.rows)
    if mpi().COMM_WORLD.rank == 0:
        print(shown)


if __name__ == "__main__":
    main()
