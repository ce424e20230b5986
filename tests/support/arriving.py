"""Bytes as the transport of a grid moves them, counted without the library's own count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

import distconv as dc


@contextmanager
def arriving(grid: dc.ProcessGrid) -> Iterator[list[int]]:
    """Yield a list of the bytes that arrive at this rank with each message of the grid."""
    sizes: list[int] = []
    carrier = grid.transport.carrier
    exchange, all_reduce, all_gather = carrier.exchange, carrier.all_reduce, carrier.all_gather

    def exchanged(into: Any, out: Any, tag: int) -> Any:
        sizes.extend(x.nbytes for _, x in into)
        return exchange(into, out, tag)

    def reduced(tensor: Tensor, group: Any) -> Any:
        sizes.append(2 * tensor.nbytes * (group.size - 1) // group.size)
        return all_reduce(tensor, group)

    def gathered(tensor: Tensor, group: Any) -> Tensor:
        result = all_gather(tensor, group)
        sizes.append(result.nbytes - tensor.nbytes)
        return result

    with (
        mock.patch.object(carrier, "exchange", exchanged),
        mock.patch.object(carrier, "all_reduce", reduced),
        mock.patch.object(carrier, "all_gather", gathered),
    ):
        yield sizes
