"""Attention along a partitioned sequence: the ways that move blocks, over gathering all keys.

One call with its backward pass is timed. The numbers decide `gathered_attention` in
`distconv/device/kinds.py`, up to which keys and values are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from benchmarks.measuring.memory import peak_of
from benchmarks.measuring.report import Row, of_bytes, over
from benchmarks.measuring.settings import Settings, by
from benchmarks.measuring.turns import alternate
from distconv.geometry.layout import Layout, cutting_axes
from distconv.geometry.topology import Topology
from distconv.grid.process_grid import ProcessGrid
from distconv.ops.attention import scaled_dot_product
from distconv.ops.attention.arrangement import Arrangement, Sizes, arrange, without
from distconv.planning.scaling import Contender, sleep_until_all_are_here
from distconv.tensor.dist_tensor import distribute_tensor

FEATURES = 32

CASES = tuple(
    (heads, queries, keys, causal)
    for heads, queries, keys in ((8, 64, 64), (8, 256, 256), (8, 1024, 1024), (8, 4096, 4096))
    for causal in (False, True)
) + ((8, 64, 4096, False), (7, 1024, 1024, False), (7, 4096, 4096, False))
"""Heads, queries and keys of one sample, and whether attention is causal."""

WAYS = ("gather", "all-to-all", "ring", "few queries")


def attentions(
    settings: Settings, cases: tuple[tuple[int, int, int, bool], ...] = CASES
) -> Iterator[Row]:
    """Yield rows of times and of peak memory for each case and way. All ranks call it."""
    grid = settings.grid(4)
    for heads, queries, keys, causal in cases:
        ways = [w for w in WAYS if w != "all-to-all" or heads % grid.size == 0]
        runs = {w: partial(_step, grid, w, heads, queries, keys, causal) for w in ways}
        sides = [Contender(make(), settings.threads) for make in runs.values()]
        times = dict(zip(ways, alternate(grid.comm, sides, settings.seconds), strict=True))
        case = f"{heads} heads, {by((queries, keys))}" + ", causal" * causal
        row = "attention", case, settings.configuration(grid)
        for way in ways[1:]:
            yield over(row, f"{way} over gather", times[way], times["gather"], None)
        alone = peak_of(partial(_serial, heads, queries, keys, causal)) if grid.rank == 0 else None
        sleep_until_all_are_here(grid.comm)
        share = grid.comm.bcast(alone).whole / grid.size
        for way, make in runs.items():
            most = max(grid.comm.allgather(peak_of(make).whole))
            yield of_bytes(row, f"{way}: peak over share of serial peak", most, share)


def _arranged(
    way: str, topology: Topology, sizes: Sizes, given: Arrangement, *how: Any
) -> Arrangement:
    """Return the partition in which attention is computed in one of `WAYS`."""
    if way == "ring":
        return given
    if way == "few queries":
        return given._replace(rows=without(given.rows, cutting_axes(given.columns)))
    causal, recorded, _ = how
    return arrange(topology, sizes, given, causal, recorded, 2**60 if way == "gather" else 0)


def _step(
    grid: ProcessGrid, way: str, heads: int, queries: int, keys: int, causal: bool
) -> Callable[[], None]:
    layout = Layout(height=tuple(axis for axis, n in grid.shape.items() if n > 1))
    q, k, v = (
        distribute_tensor(x, grid, layout).requires_grad_() for x in _operands(heads, queries, keys)
    )

    def step() -> None:
        with mock.patch.object(scaled_dot_product, "arrange", partial(_arranged, way)):
            F.scaled_dot_product_attention(q, k, v, is_causal=causal).sum().backward()
        q.grad = k.grad = v.grad = None

    return step


def _serial(heads: int, queries: int, keys: int, causal: bool) -> Callable[[], None]:
    q, k, v = (x.requires_grad_() for x in _operands(heads, queries, keys))

    def step() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=causal).sum().backward()
        q.grad = k.grad = v.grad = None

    return step


def _operands(heads: int, queries: int, keys: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = (queries, keys, keys)
    return [torch.randn(1, heads, n, FEATURES, generator=generator) for n in sizes]
