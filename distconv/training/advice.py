"""Advice on how many replicas, and how large a batch, a training can use.

Batches beyond the square root of the data set, or beyond the gradient noise scale, hardly make a
step better than smaller ones do. Further ranks are then better used within a sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt, prod

from distconv.geometry.topology import AXES
from distconv.grid.interface import Grid
from distconv.training.checks import check_count


def max_batch(samples: int) -> int:
    """Return the largest batch size that still learns well, by a rule of thumb: sqrt(samples)."""
    check_count("max_batch", "samples", samples, 1)
    return isqrt(samples)


def advise(
    grid: Grid | Mapping[str, int],
    batch_size: int,
    samples: int,
    *,
    noise_scale: float | None = None,
) -> list[str]:
    """Return warnings about a grid and a batch size, a sentence each. Nothing is refused.

    No communication. The grid need not exist yet.

    Parameters
    ----------
    grid: a grid, or the number of ranks along its axes, such as {"sample": 8, "height": 4}.
    batch_size: the samples of a step, over all replicas.
    samples: the number of samples of the training set.
    noise_scale: the gradient noise scale, if it was measured (see `NoiseScale`); None or NaN
        if it is not known.
    """
    check_count("advise", "batch_size", batch_size, 1)
    extents = grid.shape if isinstance(grid, Grid) else dict(grid)
    for axis, n in extents.items():
        if axis not in AXES:
            raise ValueError(
                f"advise: {axis!r} is no axis of a grid; choose from {', '.join(AXES)}"
            )
        check_count("advise", axis, n, 1)
    replicas, ranks = extents.get("sample", 1), prod(extents.values())
    found = []
    limits = {
        f"sqrt({samples}) = {max_batch(samples)}, the root of the data set": max_batch(samples)
    }
    if noise_scale is not None and noise_scale > 0:
        limits[f"{noise_scale:.4g}, the gradient noise scale"] = max(1, int(noise_scale))
    for words, limit in limits.items():
        if batch_size > limit:
            found.append(
                f"The batch size {batch_size} is beyond {words}: larger batches learn hardly more "
                "in a step"
            )
    if batch_size < replicas:
        found.append(
            f"The batch size {batch_size} leaves {replicas - batch_size} of {replicas} replicas "
            "without a sample"
        )
    elif batch_size % replicas:
        found.append(
            f"The batch size {batch_size} is no multiple of {replicas} replicas: replicas with "
            f"{batch_size // replicas} samples wait for replicas with one more"
        )
    # As many replicas as the batch can feed at the present samples per replica.
    each = max(1, batch_size // replicas)
    fewer = max(1, min(batch_size, *limits.values()) // each)
    while ranks % fewer:
        fewer -= 1
    if fewer < replicas:
        found.append(
            f"sample={fewer} with {ranks // fewer} ranks a sample uses the {ranks} ranks better "
            f"than sample={replicas} with {ranks // replicas}"
        )
    return found
