r"""Generate volumes of fractals with their masks, each rank its box.

    mpiexec -n 4 python -m examples.fractals.generate \
        --scale 5 --samples 70 --grid sample=4 --output train.h5
    mpiexec -n 4 python -m examples.fractals.generate \
        --scale 5 --first 70 --samples 30 --grid depth=2,height=2 --output validation.h5

The HDF5 file holds image (samples, 3, W, W, W) in 8 bits, W = 2^scale, and labels (samples, W, W,
W): 0 for background, and elsewhere 1 + the class of the uppermost fractal. Files of one `--seed`
have the same classes; `--first` is the number of the first volume.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

import distconv as dc
from distconv import Box
from distconv.transport.interface import ObjectCommunicator
from examples.generating.command_line import Progress, run
from examples.segmenting.generating import write_volumes
from examples.trainer.arguments import Add, natural

from .volumes import draw_volume, image_of

CUBES = dc.Layout(sample="sample", depth="depth", height="height", width="width")

SCALES = tuple(range(3, 12))


def generate(
    path: Path,
    samples: int,
    scale: int,
    categories: int,
    seed: int,
    grid: dc.ProcessGrid,
    first: int = 0,
    progress: Progress | None = None,
) -> list[float]:
    """Write volumes `first`, `first` + 1, ... into a new file, each rank its boxes. Collective.

    Returns the fraction of voxels of each class. The file does not depend on the grid.

    Args:
        grid: a grid whose axis `sample` cuts the samples, and whose spatial axes cut each of them.

    Raises:
        DataError: on every rank, where the file cannot be written.
    """
    side = 2**scale
    facts = {
        "samples": samples,
        "first": first,
        "scale": scale,
        "categories": categories,
        "seed": seed,
    }
    replicas = grid.shape["sample"]
    whole = dc.local_box((replicas, 1, side, side, side), grid, CUBES)
    box = Box(whole.start[2:], whole.stop[2:])

    def draw(index: int) -> tuple[np.ndarray, np.ndarray]:
        labels = draw_volume(seed, first + index, scale, categories).labels(box)
        return image_of(labels), labels

    cube = (side, side, side)
    shapes = (samples, 3, *cube), (samples, *cube)
    own = range(whole.start[0], samples, replicas)
    return write_volumes(
        grid, path, shapes, np.uint8, facts, own, box, draw, 1 + categories, progress
    )


def main(arguments: Sequence[str] | None = None, comm: ObjectCommunicator | None = None) -> None:
    """Run the command line."""

    def add(add: Add) -> None:
        add("--scale", "2^scale voxels along each side", type=int, choices=SCALES, default=5)
        add(
            "--categories",
            "classes of fractals",
            type=int,
            choices=range(1, 256),
            default=5,
            metavar="N",
        )
        add("--first", "the number of the first sample", type=natural, default=0)

    def make(args: argparse.Namespace, grid: dc.ProcessGrid, progress: Progress) -> str:
        write = partial(generate, args.output, args.samples, args.scale, args.categories)
        fractions = write(args.seed, grid, args.first, progress)
        return (
            f"{args.samples} samples of {2**args.scale}^3 voxels, {1 - fractions[0]:.1%} of them "
            f"in fractals of {args.categories} classes"
        )

    run(
        "fractals",
        __doc__ or "",
        ("sample", "depth", "height", "width"),
        add,
        make,
        arguments,
        comm,
    )


if __name__ == "__main__":
    main()
