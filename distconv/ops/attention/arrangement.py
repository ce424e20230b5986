"""The partition in which attention is computed, chosen from four ways to communicate.

Index arithmetic only, so that all ranks make the same choice. If the same grid axes partition
queries and keys, the four ways send the following shares of the global tensors to each of P ranks:

- **gather** of all keys and values, which are then replicated: (P - 1) / P of them; -
**all-to-all** of queries, keys, values and the result to a partition over samples or heads, and
back: (P - 1) / P^2 of each (Jacobs et al., DeepSpeed Ulysses, 2023); - **ring**: keys and values
are sent to all ranks in turn, (P - 1) / P of them, of which a rank holds two blocks at a time (Liu
et al., Ring Attention with Blockwise Transformers, 2023); if causal, half of that on average, and
three quarters on the busiest rank; - **few queries**: every rank gathers the queries and attends to
its own keys, and an all-reduce combines the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from distconv.geometry.layout import Axes, Cuts, Shape, cutting_axes
from distconv.geometry.topology import Topology

MOST_IDLE = 1.25
"""The largest ratio of the busiest rank's heads to the mean, for which an all-to-all is chosen.

Six heads on 4 ranks have a ratio of 1.33."""


class Arrangement(NamedTuple):
    """The grid axes that partition the dimensions of samples and heads, of queries, and of keys.

    An axis that partitions both queries and keys is an axis of a ring. Along an axis that
    partitions keys but not queries, an all-reduce combines the results of the ranks.
    """

    batch: Cuts
    rows: Cuts
    columns: Cuts


class Sizes(NamedTuple):
    """The global sizes of attention.

    Attributes
    ----------
    batch: the dimensions of samples and heads, to which all operands are broadcast.
    shared: for each of these dimensions, whether keys and values have size 1 in it.
    rows, columns: the numbers of queries and keys, each as the factors of its dimension.
    features: the features of a key, and of a value.
    """

    batch: Shape
    shared: tuple[bool, ...]
    rows: Shape
    columns: Shape
    features: tuple[int, int]


@lru_cache(maxsize=4096)
def arrange(
    topology: Topology,
    sizes: Sizes,
    given: Arrangement,
    causal: bool,
    recorded: bool,
    gathered: int,
) -> Arrangement:
    """Return the partition of attention for which the busiest rank receives the fewest elements.

    Parameters
    ----------
    sizes: the global sizes of attention.
    given: the partition of the operands.
    causal: whether a query attends only to keys whose position is not greater than its own.
    recorded: whether autograd records the attention, so that the backward pass counts as well.
    gathered: the most elements of keys and values, of a rank's samples and heads, that are always
        gathered, as no other way is as fast.
    """
    axes = cutting_axes(given.columns)
    if not axes:
        return given
    queries, keys, results = _elements(topology, sizes, given.batch)
    if keys <= gathered:
        return given._replace(columns=((),) * len(given.columns))

    def moved(parts: int) -> float:
        return 1 - 1 / parts

    ring = [a for a in cutting_axes(given.rows) if a in axes]
    parts = topology.parts(axes)
    few = given._replace(rows=without(given.rows, axes))
    spread = topology.parts(cutting_axes(few.rows))
    combined = 2 * results / spread * moved(parts)
    choices = [(queries / spread * moved(topology.parts(ring)) + combined, few)]
    if ring:
        # The backward pass sends keys to all ranks again, and gradients back to the owners.
        passes = 1.5 if recorded else 1
        choices.append((keys * moved(parts) * passes * (0.75 if causal else 1), given))
        every = tuple(dict.fromkeys((*cutting_axes(given.rows), *axes)))
        free = [d for d, shared in enumerate(sizes.shared) if not shared]
        heads = over_batch(topology, sizes.batch, given.batch, free, every)
        if heads is not None:
            batch, idle = heads
            whole = Arrangement(batch, ((),) * len(given.rows), ((),) * len(given.columns))
            n = topology.parts(every)
            choices.insert(0, ((queries + keys + results) * moved(n) / n * idle, whole))
    return min(choices, key=lambda choice: choice[0])[1]


@lru_cache(maxsize=4096)
def arrange_whole_keys(topology: Topology, sizes: Sizes, given: Arrangement) -> Arrangement:
    """Return the partition with unpartitioned keys for which the busiest rank receives the least.

    The choice is between a gather of keys and values and an all-to-all; `given` is the partition of
    the operands.
    """
    axes, cut = cutting_axes(given.columns), cutting_axes(given.rows)
    gather = given._replace(columns=((),) * len(given.columns))
    every = tuple(dict.fromkeys((*cut, *axes)))
    free = [d for d, shared in enumerate(sizes.shared) if not shared]
    heads = over_batch(topology, sizes.batch, given.batch, free, every) if axes else None
    if heads is None:
        return gather
    batch, idle = heads
    queries, keys, results = _elements(topology, sizes, given.batch)
    n, rows, columns = (topology.parts(a) for a in (every, cut, axes))
    there = (queries * (1 - 1 / rows) + keys * (1 - 1 / columns)) / n
    if idle * (there + results / rows * (1 - 1 / n)) > keys * (1 - 1 / columns):
        return gather
    return Arrangement(batch, ((),) * len(given.rows), ((),) * len(given.columns))


def _elements(topology: Topology, sizes: Sizes, batch: Cuts) -> tuple[float, float, float]:
    """Return the numbers of elements of queries, of keys and values, and of results.

    Only the samples and heads of one rank count. `batch` has the grid axes that partition samples
    and heads.
    """
    share = topology.parts(cutting_axes(batch))
    rows = prod(sizes.batch) * prod(sizes.rows) / share
    pairs = [(b, s) for b, s in zip(sizes.batch, sizes.shared, strict=True)]
    columns = prod(1 if s else b for b, s in pairs) * prod(sizes.columns) / share
    queries, results = (rows * n for n in sizes.features)
    return queries, columns * sum(sizes.features), results


def without(cuts: Cuts, axes: Axes) -> Cuts:
    """Return `cuts`, the grid axes that partition each dimension, without those in `axes`."""
    return tuple(tuple(a for a in own if a not in axes) for own in cuts)


def over_batch(
    topology: Topology, batch: Shape, cuts: Cuts, free: Sequence[int], axes: Axes
) -> tuple[Cuts, float] | None:
    """Return a partition of samples and heads that also uses `axes`, and its load imbalance.

    `batch` has the sizes of the dimensions of samples and heads; `cuts` has the grid axes that
    partition each of them already. Only the dimensions in `free` may be partitioned further, the
    last one first. The load imbalance is the ratio of the busiest rank's work to the mean. Returns
    None if the ratio is more than `MOST_IDLE`.
    """
    best: tuple[float, Cuts] | None = None
    for places in product(free[::-1], repeat=len(axes)):
        made = tuple(
            (*own, *(a for a, d in zip(axes, places, strict=True) if d == at))
            for at, own in enumerate(cuts)
        )
        parts = [topology.parts(own) for own in made]
        pairs = zip(batch, parts, strict=True)
        idle = prod(ceil(n / p) * p / n for n, p in pairs if n)
        if best is None or idle < best[0]:
            best = idle, made
    return None if best is None or best[0] > MOST_IDLE else (best[1], best[0])
