r"""Generate universes: the density of matter in periodic boxes at four redshifts, in slabs.

    mpiexec -n 4 python -m examples.cosmoflow.generate \
        --samples 256 --size 32 --grid sample=4 --output train.h5
    mpiexec -n 64 python -m examples.cosmoflow.generate \
        --samples 64 --size 512 --grid sample=4,depth=16 --output train.h5

The ranks along `depth` share a universe, so that no rank holds a whole volume; ranks along `sample`
make different universes at the same time. The HDF5 file holds density (samples, 4, W, W, W) in
float32, over the mean density, at the redshifts in its attributes, and parameters (samples, 4):
Omega_m, sigma_8, n_s and H_0.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

import distconv as dc
from distconv.data import DataError, together
from distconv.transport.interface import ObjectCommunicator
from examples.generating.command_line import Progress, run
from examples.generating.samples import create_samples
from examples.trainer.arguments import Add, positive

from .cosmology import RANGES, draw_cosmology
from .simulation import SLABS, density_contrast, displaced_density, displacements, white_noise

REDSHIFTS = (3.0, 1.5, 0.5, 0.0)
"""The redshifts of the channels, the oldest first."""

SIDES = (8, 16, 32, 64, 128, 256, 512)
"""Numbers of cells along a side that the networks accept."""


def generate(
    path: Path,
    samples: int,
    width: int,
    cell: float,
    seed: int,
    grid: dc.ProcessGrid,
    progress: Progress | None = None,
) -> None:
    """Write universes into a new file. Collective.

    Universe i depends on `seed` and i alone, whatever the grid, but for rounding.

    Args:
        width: the number of cells along a side.
        cell: the side of a cell, in Mpc/h.
        grid: a grid with the axes `sample` and `depth`.

    Raises:
        DataError: on every rank, where the file cannot be written, or there are more ranks along
            depth than planes.
    """
    if grid.shape["depth"] > width:
        raise DataError(
            f"depth={grid.shape['depth']} leaves ranks without a plane of {width}; choose at most "
            f"{width}, and more along sample"
        )
    channels = len(REDSHIFTS)
    arrays = {
        "density": ((samples, channels, width, width, width), np.float32),
        "parameters": ((samples, len(RANGES)), np.float64),
    }
    facts = {
        "samples": samples,
        "width": width,
        "cell": cell,
        "seed": seed,
        "redshifts": REDSHIFTS,
        "parameters": list(RANGES),
    }
    moments = np.zeros((2, channels))
    parameters: list[list[float]] = []
    together_made = grid.shape["sample"]
    with create_samples(grid, path, arrays, facts) as opened:
        for begin in range(0, samples, together_made):
            universes = range(begin, min(begin + together_made, samples))
            cosmologies = [draw_cosmology(seed, index) for index in universes]
            noise = white_noise(seed, universes, width, grid)
            psi = displacements(density_contrast(noise, cosmologies, cell))
            densities = []
            for redshift in REDSHIFTS:
                growth = [cosmology.growth(redshift) for cosmology in cosmologies]
                densities.append(displaced_density(psi, growth).to_local())
            values = np.concatenate([x.numpy() for x in densities], axis=1).astype(np.float32)
            logarithm = np.log1p(values, dtype=np.float64)
            moments += [(logarithm**power).sum((0, 2, 3, 4)) for power in (1, 2)]
            box = dc.local_box(noise.shape, grid, SLABS)
            place = (begin + box.start[0], 0, box.start[2], 0, 0)
            together(grid, partial(opened.write, "density", place, values))
            if grid.rank == 0:
                parameters += [[getattr(c, name) for name in RANGES] for c in cosmologies]
            if progress is not None:
                progress(universes.stop)

        def write_parameters() -> None:
            if parameters:
                opened.write("parameters", (0, 0), np.array(parameters))

        together(grid, write_parameters)
        mean, square = sum(grid.all_gather_object(moments)) / (samples * width**3)
        opened.facts["log_mean"] = mean
        opened.facts["log_deviation"] = np.sqrt(square - mean**2)


def main(arguments: Sequence[str] | None = None, comm: ObjectCommunicator | None = None) -> None:
    """Run the command line."""

    def add(add: Add) -> None:
        add("--size", "cells along a side", type=int, choices=SIDES, default=32)
        add("--cell", "the side of a cell, in Mpc/h", type=positive(float), default=4.0)

    def make(args: argparse.Namespace, grid: dc.ProcessGrid, progress: Progress) -> str:
        generate(args.output, args.samples, args.size, args.cell, args.seed, grid, progress)
        side = args.size * args.cell
        return f"{args.samples} universes of {args.size}^3 cells, {side:g} Mpc/h a side"

    run("cosmoflow", __doc__ or "", ("sample", "depth"), add, make, arguments, comm)


if __name__ == "__main__":
    main()
