"""Command lines of the examples: options with their defaults, and errors in one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from distconv.data import DataError
from distconv.tools.command_line import RankParser, grid_axes
from distconv.transport.interface import ObjectCommunicator


class Add(Protocol):
    """Adds an option to a command line, with the default in its help."""

    def __call__(self, option: str, text: str, **keywords: Any) -> None:
        """Add an option; keywords are those of `argparse.ArgumentParser.add_argument`."""


def command_line(
    program: str,
    description: str,
    comm: ObjectCommunicator | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> tuple[RankParser, Add]:
    """Return a parser for the ranks of `comm`, and a function that adds options to it.

    Args:
        program: its module, under `examples`.
        description: the beginning of `--help`.
        comm: all ranks of the job when not given, or a process that is started alone.
        defaults: defaults by name that differ from those with which options are added.
    """
    parser = RankParser(
        comm,
        prog=f"python -m examples.{program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(option: str, text: str, **keywords: Any) -> None:
        name = option.lstrip("-").replace("-", "_")
        if defaults and name in defaults:
            keywords["default"] = defaults[name]
        if keywords.get("default") not in (None, False):
            text += " (default %(default)s)"
        parser.add_argument(option, help=text, **keywords)

    return parser, add


def add_grid(add: Add, axes: Sequence[str], default: str) -> None:
    """Add the option for the process grid, whose axes are some of `axes`."""
    add(
        "--grid",
        "ranks along the axes of the process grid; one may be -1, for all that remain",
        type=partial(grid_axes, axes=axes),
        default=default,
        metavar="AXIS=RANKS,...",
    )


@contextmanager
def errors_in_one_line(
    comm: ObjectCommunicator, kinds: tuple[type[Exception], ...] = (DataError,)
) -> Iterator[None]:
    """Let errors that all ranks raise end the program with one line, and exit status 2."""
    try:
        yield
    except kinds as error:
        if comm.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def natural(text: str) -> int:
    """Return a non-negative integer."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def fraction(text: str) -> float:
    """Return a number between 0 and 1, both excluded."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number between 0 and 1")
    return number


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
