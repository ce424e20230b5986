"""Generate samples of tangling meshes, each rank its share.

    python -m examples.mesh_tangling.generate --samples 64 --size 128 --output train.h5
    mpiexec -n 4 python -m examples.mesh_tangling.generate --samples 64 --output train.h5

The file is the same on any number of ranks, byte for byte.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import distconv as dc
from distconv.data import on_rank_zero, together
from distconv.transport.interface import ObjectCommunicator
from examples.generating.command_line import Progress, run
from examples.trainer.arguments import Add

from . import store
from .simulation import HORIZON, draw_flow, simulate

SMALLEST_SIZE = 8
"""The smallest number of zones along a side at which the bubble is resolved."""


def generate(
    path: str | os.PathLike[str],
    samples: int,
    size: int,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> float:
    """Write `samples` samples of `size` x `size` zones to the HDF5 file `path` (see `store`).

    Sample i depends on `seed` and i alone. `progress` is called with the number of samples written
    so far. Returns the fraction of zones that tangle. Missing folders are made; raises ValueError
    for numbers out of range.
    """
    check(samples, size, seed)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with store.create(path, samples, size, seed=seed, horizon=HORIZON) as writer:
        return fill(writer, range(samples), size, seed, progress) / samples


def generate_together(
    grid: dc.ProcessGrid,
    path: Path,
    samples: int,
    size: int,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> float:
    """Generate as `generate` does, each rank of `grid` its share of the samples. Collective.

    Raises DataError on every rank where `generate` raises on any.
    """
    with ExitStack() as stack:
        writers: list[store.Writer] = []

        def make() -> Path:
            check(samples, size, seed)
            path.parent.mkdir(parents=True, exist_ok=True)
            creating = store.create(path, samples, size, seed=seed, horizon=HORIZON)
            writers.append(stack.enter_context(creating))
            return writers[0].path

        def write() -> tuple[store.Field, store.Field, float]:
            own = range(grid.rank, samples, grid.size)
            if writers:
                return (
                    writers[0].means,
                    writers[0].variances,
                    fill(writers[0], own, size, seed, progress),
                )
            with closing(store.Writer(partial)) as writer:
                tangled = fill(writer, own, size, seed, progress)
            return writer.means, writer.variances, tangled

        partial = on_rank_zero(grid, make)
        found = grid.all_gather_object(together(grid, write))
        for writer in writers:
            writer.merge((means, variances) for means, variances, _ in found)
        on_rank_zero(grid, stack.close)
    return sum(tangled for _, _, tangled in found) / samples


def fill(
    writer: store.Writer,
    indices: Iterable[int],
    size: int,
    seed: int,
    progress: Callable[[int], None] | None,
) -> float:
    """Write the samples of these numbers, and return the sum of their tangled fractions."""
    tangled = 0.0
    for index in indices:
        sample = simulate(draw_flow(seed, index), size)
        writer.write(index, sample.fields, sample.tangled)
        tangled += float(sample.tangled.mean())
        if progress is not None:
            progress(index + 1)
    return tangled


def check(samples: int, size: int, seed: int) -> None:
    """Raise `ValueError` for numbers out of range."""
    if samples < 1:
        raise ValueError(f"samples={samples} is not a number of samples; choose 1 or more")
    if size < SMALLEST_SIZE:
        raise ValueError(
            f"size={size} zones a side cannot resolve the bubble; choose {SMALLEST_SIZE} or more"
        )
    if seed < 0:
        raise ValueError(f"seed={seed} is negative; choose 0 or more")


def main(arguments: Sequence[str] | None = None, comm: ObjectCommunicator | None = None) -> None:
    """Run the command line."""

    def add(add: Add) -> None:
        add("--size", "zones along a side", type=int, default=128)

    def make(args: argparse.Namespace, grid: dc.ProcessGrid, progress: Progress) -> str:
        fraction = generate_together(
            grid, args.output, args.samples, args.size, args.seed, progress
        )
        return (
            f"{args.samples} samples of {args.size} x {args.size} zones, "
            f"{fraction:.1%} of them tangle"
        )

    run("mesh_tangling", __doc__ or "", ("sample",), add, make, arguments, comm)


if __name__ == "__main__":
    main()
