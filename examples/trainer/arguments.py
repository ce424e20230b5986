"""The command line of a training run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from distconv.tools.arguments import RankParser, grid_axes
from distconv.transport.interface import ObjectCommunicator


class Add(Protocol):
    """Adds an option to a command line, with the default in its help."""

    def __call__(self, option: str, text: str, **keywords: Any) -> None:
        """Add an option; keywords are those of `argparse.ArgumentParser.add_argument`."""


def parse_arguments(
    comm: ObjectCommunicator,
    arguments: Sequence[str] | None,
    *,
    program: str,
    description: str,
    axes: Sequence[str],
    add_own: Callable[[Add], None],
    optimizers: Iterable[str],
    precisions: Iterable[str],
    defaults: Mapping[str, Any],
) -> argparse.Namespace:
    """Parse the command line on every rank of `comm`: it succeeds on all, or on none. Collective.

    Args:
        program: the command that starts the program.
        description: the beginning of `--help`.
        axes: the axes that `--grid` may name.
        add_own: adds the options of one example.
        optimizers, precisions: the choices.
        defaults: defaults of the shared options that an example changes.
    """
    parser = RankParser(
        comm,
        prog=program,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def add(option: str, text: str, **keywords: Any) -> None:
        name = option.lstrip("-").replace("-", "_")
        if name in defaults:
            keywords["default"] = defaults[name]
        if keywords.get("default") not in (None, False):
            text += " (default %(default)s)"
        parser.add_argument(option, help=text, **keywords)

    add("--data", "samples to train on", type=Path, required=True)
    add("--validation", "samples to validate on", type=Path, required=True)
    add("--output", "folder for checkpoint, pictures and metrics", type=Path, required=True)
    add(
        "--grid",
        "ranks along the axes of the process grid; one may be -1, for all that remain",
        type=partial(grid_axes, axes=axes),
        default="sample=-1",
        metavar="AXIS=RANKS,...",
    )
    add_own(add)
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
    add(
        "--tensorboard",
        "also log losses and scores for TensorBoard, in the folder tensorboard of the output",
        action="store_true",
    )
    return parser.parse_args(arguments)


def natural(text: str) -> int:
    """Return a non-negative integer."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def positive(kind: type[int] | type[float]) -> Callable[[str], int | float]:
    """Return a function that converts a text to a positive number of this kind."""

    def convert(text: str) -> int | float:
        try:
            number = kind(text)
        except ValueError:
            number = 0
        if not 0 < number < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is not a positive {kind.__name__}")
        return number

    return convert
