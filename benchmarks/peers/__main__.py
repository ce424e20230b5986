"""`mpiexec -n 2 python -m benchmarks.peers NAME ...`: peers beside distconv, where installed.

Each is compared with serial torch in float64, and timed in turns with distconv in float32. Rank 0
prints a row of a table for each network.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributed

from benchmarks.measuring.network import Network
from benchmarks.measuring.settings import chain
from benchmarks.measuring.turns import alternate
from benchmarks.networks import NETWORKS, residual
from benchmarks.peers.peer import Peer, Task, largest_difference, own, serial
from distconv.planning.scaling import Contender, spread
from distconv.transport.launch import mpi

PEERS = ("distdl", "dtensor", "jax", "lbann", "shardtensor")

_NAMED = {network.name: network for network in NETWORKS}
CASES: tuple[Network, ...] = (
    Network(
        *("convolutions, 32 channels, 128^2", lambda spatial: residual(32, 4, False)),
        shape=(1, 32, 128, 128),
    ),
    _NAMED["residual, 32 channels, 128^2"],
    _NAMED["2-D U-Net, 256^2"],
    _NAMED["3-D U-Net, group norm, 64 channels, 32^3"]._replace(target=torch.rand, loss=F.mse_loss),
)

HEADING = (
    "| peer | network | its time over distconv's | its difference to serial | distconv's |\n"
    "|---|---|---|---|---|"
)


def rows(name: str, seconds: float, cases: Sequence[Network] = CASES) -> Iterator[str]:
    """Yield a row for each network; all ranks of MPI call it."""
    try:
        peer: Peer = importlib.import_module(f"benchmarks.peers.{name}")  # type: ignore[assignment]
    except ImportError as error:
        yield f"| {name} | | not installed: {error} | | |"
        return
    _default_group()
    for network in cases:
        start = f"| {peer.NAME} | {network.name} |"
        outcomes = mpi().COMM_WORLD.allgather(_outcome(peer, network, seconds))
        failures = [outcome for outcome in outcomes if isinstance(outcome, str)]
        if not failures:
            yield f"{start} {' | '.join(outcomes[0])} |"
            continue
        alike = len(failures) == len(outcomes)
        yield f"{start} {failures[0]}{'' if alike else ', on some ranks only'} | | |"
        if not alike:
            return  # its messages may be out of step


def _default_group() -> None:
    """Make the default group of torch.distributed, where there is none; all ranks call it."""
    if distributed.is_initialized():
        return
    comm = mpi().COMM_WORLD
    folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    store = distributed.FileStore(f"{folder}/store", comm.size)
    # Where ranks of a peer wait for each other in vain, that is its result.
    limit = timedelta(seconds=60)
    distributed.init_process_group(
        "gloo", store=store, rank=comm.rank, world_size=comm.size, timeout=limit
    )


def _outcome(peer: Peer, network: Network, seconds: float) -> tuple[str, ...] | str:
    """Return time and differences in words, or an error; all ranks call it."""
    comm = mpi().COMM_WORLD
    grid = chain("height" if len(network.shape) == 4 else "depth")
    compared = getattr(peer, "compared", None)
    exact = Task.of(compared(network) if compared else network, torch.float64)
    expected, ours = serial(exact), own(exact, grid)
    for step in (expected, ours):
        step.run()
    differences = [0.0, largest_difference(ours.gradients(), expected.gradients())]
    try:
        theirs = peer.step(exact, comm.size)
        if theirs.ranks is None or comm.rank < theirs.ranks:
            theirs.run()
            differences[0] = largest_difference(theirs.gradients(), expected.gradients())
        timed = Task.of(network, torch.float32)
        steps: list[Any] = [peer.step(timed, comm.size), own(timed, grid)]
        steps[0].run()
    except Exception as error:  # whatever a peer raises is its result
        words, *_ = str(error).strip().splitlines() or ["without a word"]
        return f"{type(error).__name__}: {words[:120]}"
    sides = [Contender(step.run, ranks=step.ranks) for step in steps]
    subject, bound = alternate(grid.comm, sides, seconds)
    middle, low, high = spread([s / b for s, b in zip(subject, bound, strict=True)])
    ratio = f"{middle:.2f} ({low:.2f} to {high:.2f})"
    return ratio, *(f"{difference:.0e}" for difference in differences)


def main() -> None:
    """Print the rows of the peers that are named, or all; all ranks of MPI call it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("peers", nargs="*", metavar="NAME", help=", ".join(PEERS))
    parser.add_argument("--seconds", type=float, default=10.0, help="for each network")
    given = parser.parse_args()
    comm = mpi().COMM_WORLD
    if comm.rank == 0:
        print(HEADING, flush=True)
    for name in given.peers or PEERS:
        for row in rows(name, given.seconds):
            if comm.rank == 0:
                print(row, flush=True)


if __name__ == "__main__":
    main()
