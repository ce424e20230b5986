"""Generate samples of tangling meshes: `python -m examples.mesh_tangling.generate --help`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from . import store
from .simulation import HORIZON, draw_flow, simulate

SMALLEST_SIZE = 8
"""Zones along a side below which not even the bubble is resolved."""


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
    if samples < 1:
        raise ValueError(f"samples={samples} is not a number of samples; choose 1 or more")
    if size < SMALLEST_SIZE:
        raise ValueError(
            f"size={size} zones a side cannot resolve the bubble; choose {SMALLEST_SIZE} or more"
        )
    if seed < 0:
        raise ValueError(f"seed={seed} is negative; choose 0 or more")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    tangled = 0.0
    with store.create(path, samples, size, seed=seed, horizon=HORIZON) as writer:
        for index in range(samples):
            sample = simulate(draw_flow(seed, index), size)
            writer.write(index, sample.fields, sample.tangled)
            tangled += float(sample.tangled.mean())
            if progress is not None:
                progress(index + 1)
    return tangled / samples


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.mesh_tangling.generate", description=__doc__
    )
    parser.add_argument("--samples", type=int, default=64, help="number of samples (%(default)s)")
    parser.add_argument("--size", type=int, default=128, help="zones along a side (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (%(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="HDF5 file to write")
    options = parser.parse_args(arguments)

    def show(done: int) -> None:
        print(f"\r{done}/{options.samples} samples", end="", file=sys.stderr, flush=True)

    start = time.perf_counter()
    try:
        fraction = generate(options.output, options.samples, options.size, options.seed, show)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(file=sys.stderr)
    print(
        f"{options.output}: {options.samples} samples of {options.size} x {options.size} zones, "
        f"{fraction:.1%} of them tangle; {time.perf_counter() - start:.1f} s"
    )


if __name__ == "__main__":
    main()
