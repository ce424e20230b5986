"""Generate samples of tangling meshes, each rank its share.

    python -m examples.mesh_tangling.generate --samples 64 --size 128 --output train.h5
    mpiexec -n 4 python -m examples.mesh_tangling.generate --samples 64 --output train.h5

The file is the same on any number of ranks, byte for byte.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import distconv as dc
from distconv.data import DataError, together
from distconv.transport.interface import ObjectCommunicator
from examples.generating.command_line import Progress, run
from examples.trainer.arguments import Add, positive

from . import store
from .simulation import HORIZON, draw_flow, simulate

SMALLEST_SIZE = 8
"""The smallest number of zones along a side at which the bubble is resolved."""


def generate(
    path: Path,
    samples: int,
    size: int,
    seed: int,
    grid: dc.ProcessGrid,
    progress: Progress | None = None,
    horizon: float = HORIZON,
) -> float:
    """Write samples of `size` x `size` zones to a new file (see `store`), each rank its share.
    Collective.

    Sample i depends on `seed` and i alone, and the file does not depend on the grid. The label
    marks zones that tangle within `horizon` seconds of the snapshot. Returns their fraction.

    Raises:
        DataError: on every rank, where the file cannot be written, or the mesh is too coarse.
    """
    if size < SMALLEST_SIZE:
        raise DataError(
            f"size={size} zones a side cannot resolve the bubble; choose {SMALLEST_SIZE} or more"
        )
    with store.create(grid, path, samples, size, seed=seed, horizon=horizon) as writer:

        def write() -> float:
            tangled = 0.0
            for index in range(grid.rank, samples, grid.size):
                sample = simulate(draw_flow(seed, index), size, horizon)
                writer.write(index, sample.fields, sample.tangled)
                tangled += float(sample.tangled.mean())
                if progress is not None:
                    progress(index + 1)
            return tangled

        return sum(grid.all_gather_object(together(grid, write))) / samples


def main(arguments: Sequence[str] | None = None, comm: ObjectCommunicator | None = None) -> None:
    """Run the command line."""

    def add(add: Add) -> None:
        add("--size", "zones along a side", type=int, default=128)
        add(
            "--horizon",
            "seconds after the snapshot within which a zone must tangle to be labelled",
            type=positive(float),
            default=HORIZON,
        )

    def make(args: argparse.Namespace, grid: dc.ProcessGrid, progress: Progress) -> str:
        facts = args.output, args.samples, args.size, args.seed, grid, progress, args.horizon
        fraction = generate(*facts)
        return (
            f"{args.samples} samples of {args.size} x {args.size} zones, "
            f"{fraction:.1%} of them tangle"
        )

    run("mesh_tangling", __doc__ or "", ("sample",), add, make, arguments, comm)


if __name__ == "__main__":
    main()
