"""The ways to compute attention, chosen by a test in place of the measured rule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from distconv.geometry.layout import cutting_axes
from distconv.ops.attention import arrangement, blocks, scaled_dot_product, schedule
from distconv.ops.attention.arrangement import Arrangement, without

WAYS = ("smallest", "ring", "few queries", "gather")
"""The way that moves the fewest elements, as if nothing were small, or always the same way."""

_ARRANGE = arrangement.arrange


@contextmanager
def attending_by(way: str, tiny: bool = True) -> Iterator[None]:
    """Compute attention within the context by one of `WAYS`, in tiny tiles and many tours.

    Without `tiny`, tiles have the usual size.
    """

    def arrange(topology: Any, sizes: Any, given: Arrangement, *how: Any) -> Arrangement:
        if way == "ring":
            return given
        if way == "few queries":
            return given._replace(rows=without(given.rows, cutting_axes(given.columns)))
        return _ARRANGE(topology, sizes, given, *how[:-1], 2**60 if way == "gather" else 0)

    with (
        mock.patch.object(scaled_dot_product, "arrange", arrange),
        mock.patch.object(schedule, "SMALLEST_VISITOR", 1),
        mock.patch.object(blocks, "TILE", 8 if tiny else blocks.TILE),
    ):
        forget()
        yield
    forget()


def forget() -> None:
    """Empty the caches that depend on the settings."""
    for cached in (schedule.tours_of, schedule.rounds_of):
        cached.cache_clear()
