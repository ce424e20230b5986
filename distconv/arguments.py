"""Command lines that every rank parses, and what they say of grids, shapes and layouts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from distconv.layout import Layout
from distconv.topology import AXES


class RankParser(argparse.ArgumentParser):
    """A parser for every rank, of which rank 0 alone prints help and complaints.

    `rank` is this one's number, that in MPI.COMM_WORLD when not given.
    """

    def __init__(self, rank: int | None = None, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._rank = MPI.COMM_WORLD.rank if rank is None else rank

    def _print_message(self, message: str, file: Any = None) -> None:
        if self._rank == 0:
            super()._print_message(message, file)


def grid_axes(text: str, axes: Sequence[str] = AXES) -> dict[str, int]:
    """`sample=2,height=-1` as the keyword arguments of a `ProcessGrid`."""
    extents: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, ranks = part.strip().partition("=")
        if axis not in axes or axis in extents or not equals:
            raise argparse.ArgumentTypeError(
                f"{part!r} is not an axis with its ranks; write AXIS=RANKS once for each axis, "
                f"separated by commas, with an axis of {', '.join(axes)}"
            )
        try:
            extents[axis] = int(ranks)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r}: {ranks!r} is not a whole number") from None
    return extents


def shape(text: str) -> tuple[int, ...]:
    """`1,18,256,256` as the shape of a tensor."""
    sizes = text.split(",")
    if not all(size.strip().isdecimal() for size in sizes):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a shape; write the sizes with commas between, such as 1,18,256,256"
        )
    return tuple(map(int, sizes))


def layout(text: str) -> Layout:
    """`height=height+width,sample` as a `Layout`; `whole` is one without cuts."""
    dimensions = {}
    for part in text.split(",") if text != "whole" else ():
        name, equals, axes = part.strip().partition("=")
        dimensions[name] = tuple(axes.split("+")) if equals else name
    try:
        return Layout(**dimensions)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{error}. Write DIMENSION=AXIS+AXIS,..., DIMENSION where the axis has its name, or "
            "'whole'"
        ) from None


def pattern_and_layout(text: str) -> tuple[str, Layout]:
    """`block5.*:channel=height,sample` as a pattern of module names and its `Layout`."""
    pattern, colon, cuts = text.rpartition(":")
    if not colon:
        raise argparse.ArgumentTypeError(
            f"{text!r} gives no layout to a pattern; write PATTERN:DIMENSION=AXIS+AXIS,..., such "
            "as 'block5.*:sample,channel=height'"
        )
    return pattern, layout(cuts)
