"""Generate tomographic volumes with their labels, each rank its samples.

    mpiexec -n 4 python -m examples.unet3d.generate --samples 48 --size 33,37,35 --output train.h5

The HDF5 file holds image (samples, 1, D, H, W) in float32, and labels (samples, D, H, W) with
the classes 0 background, 1 body, 2 organ, 3 lesion.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import distconv as dc
from distconv import Box
from distconv.transport.interface import ObjectCommunicator
from examples.generating.command_line import Progress, run
from examples.segmenting.generating import write_volumes
from examples.trainer.arguments import Add

from .tomography import CLASSES, draw_scene

SMALLEST_SIDE = 8
"""The smallest side of a volume, in voxels, for the network's levels."""


def side_lengths(text: str) -> tuple[int, int, int]:
    """Parse `33,37,35` into the sides (D, H, W) of a volume; `33` into three equal ones."""
    words = text.split(",")
    words = 3 * words if len(words) == 1 else words
    if len(words) != 3 or not all(w.strip().isdecimal() for w in words):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write D,H,W, such as 33,37,35")
    depth, height, width = map(int, words)
    if min(depth, height, width) < SMALLEST_SIDE:
        raise argparse.ArgumentTypeError(
            f"{text!r} is too small for the levels of the network; choose sides of "
            f"{SMALLEST_SIDE} or more"
        )
    return depth, height, width


def generate(
    path: Path,
    samples: int,
    shape: tuple[int, int, int],
    seed: int,
    grid: dc.ProcessGrid,
    progress: Progress | None = None,
) -> list[float]:
    """Write samples into a new file, each rank its share. Collective.

    Returns the fraction of voxels of each class. The files do not depend on the grid.
    """
    facts = {"samples": samples, "size": shape, "seed": seed, "classes": CLASSES}
    whole = Box((0, 0, 0), shape)

    def draw(index: int) -> tuple[np.ndarray, np.ndarray]:
        scene = draw_scene(seed, index, shape)
        labels = scene.labels(whole)
        return scene.image(whole).astype(np.float32)[None], labels

    shapes = (samples, 1, *shape), (samples, *shape)
    own = range(grid.rank, samples, grid.size)
    return write_volumes(
        grid, path, shapes, np.float32, facts, own, whole, draw, len(CLASSES), progress
    )


def main(arguments: Sequence[str] | None = None, comm: ObjectCommunicator | None = None) -> None:
    """Run the command line."""

    def add(add: Add) -> None:
        add("--size", "voxels along depth, height and width", type=side_lengths, default="33,37,35")

    def make(args: argparse.Namespace, grid: dc.ProcessGrid, progress: Progress) -> str:
        fractions = generate(args.output, args.samples, args.size, args.seed, grid, progress)
        shares = ", ".join(f"{f:.1%} {name}" for name, f in zip(CLASSES, fractions, strict=True))
        sides = " x ".join(map(str, args.size))
        return f"{args.samples} samples of {sides} voxels, {shares}"

    run("unet3d", __doc__ or "", ("sample",), add, make, arguments, comm)


if __name__ == "__main__":
    main()
