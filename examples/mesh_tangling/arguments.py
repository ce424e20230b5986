"""The command line of the training run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from distconv.tools.arguments import RankParser, grid_axes
from distconv.transport.communicator import ObjectCommunicator

AXES = ("sample", "channel", "filter", "height", "width")
"""Meshes have no depth."""


def parse_arguments(
    comm: ObjectCommunicator,
    arguments: Sequence[str] | None,
    description: str | None,
    networks: Iterable[str],
    optimizers: Iterable[str],
    precisions: Iterable[str],
) -> argparse.Namespace:
    """Parse the command line on every rank of `comm`: all get through, or none. Collective."""
    parser = RankParser(
        comm,
        prog="python -m examples.mesh_tangling.train",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def add(option: str, text: str, **keywords: object) -> None:
        if keywords.get("default") is not None:
            text += " (default %(default)s)"
        parser.add_argument(option, help=text, **keywords)  # type: ignore[arg-type]

    add("--data", "HDF5 file to train on", type=Path, required=True)
    add("--validation", "HDF5 file to validate on", type=Path, required=True)
    add("--output", "folder for checkpoint, pictures and metrics", type=Path, required=True)
    add(
        "--grid",
        "ranks along the axes of the process grid; one may be -1, for all that remain",
        type=partial(grid_axes, axes=AXES),
        default="sample=-1",
        metavar="AXIS=RANKS,...",
    )
    add("--network", "published for 1024^2 or 2048^2 zones", choices=networks, default="2k")
    add("--width", "multiplies the channels of the network", type=positive(float), default=1.0)
    add(
        "--size",
        "zones a side of the mesh that the network is scaled to (default: that of the data)",
        type=positive(int),
    )
    add("--epochs", "how often to go through the data", type=positive(int), default=18)
    add("--batch-size", "samples of a mini-batch, over all ranks", type=positive(int), default=64)
    add("--optimizer", "how to step", choices=optimizers, default="adam")
    add("--learning-rate", "how far to step", type=positive(float), default=1e-3)
    add("--seed", "of the initial weights and the shuffling", type=natural, default=0)
    add("--precision", "of data, weights and arithmetic", choices=precisions, default="float32")
    add("--resume", "continue from the last checkpoint in this folder", type=Path, metavar="FOLDER")
    add(
        "--compare-serial",
        "first take N steps on the grid and on one rank alone, and print how far they differ",
        type=positive(int),
        metavar="N",
    )
    return parser.parse_args(arguments)


def natural(text: str) -> int:
    """Return a whole number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def positive(kind: type[int] | type[float]) -> Callable[[str], int | float]:
    """Return the conversion of a text to a positive number of this kind."""

    def convert(text: str) -> int | float:
        try:
            number = kind(text)
        except ValueError:
            number = 0
        if not 0 < number < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is not a positive {kind.__name__}")
        return number

    return convert
