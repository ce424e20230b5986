"""Measurements of an autoencoder on one rank, cut over several, and in the tiles of diffusers."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import distconv as dc
from distconv.planning.operators import tensor_bytes
from distconv.planning.scaling import sleep_until_all_are_here

from .networks import Autoencoder, decoded, encoded, tile


class Way(NamedTuple):
    """One way to compute images from latents, or latents from images.

    Attributes
    ----------
    name: "one rank", "n ranks" or "tiles".
    seconds: the seconds of a call, on the slowest rank.
    bytes: the peak bytes of tensors in a call, without weights and input, on the rank with most.
    result: the whole result, on the first rank.
    """

    name: str
    seconds: float
    bytes: int
    result: Tensor


class Half(NamedTuple):
    """A decoder or an encoder, with all ways to compute it; the first is one rank's.

    Attributes
    ----------
    autoencoder: the name of the autoencoder.
    call: "decode" or "encode".
    pixels: the shape of the images.
    """

    autoencoder: str
    call: str
    pixels: tuple[int, ...]
    ways: list[Way]

    def error(self, way: Way) -> float:
        """Return the largest difference from one rank's result, over its largest magnitude."""
        whole = self.ways[0].result
        return float((way.result - whole).abs().max() / whole.abs().max())


def compare(autoencoder: Autoencoder, size: int, comm: Any) -> Iterator[Half]:
    """Yield decoder and encoder, for images of `size` x `size` pixels. Collective.

    Ranks that take no part in a way sleep. On ranks other than the first the results are empty.
    """
    parts = [n for n in (1, 2, 4) if n <= comm.size]
    ranks = {n: comm.Split(comm.rank < n) for n in parts}
    latents = autoencoder.latents(size)
    images = torch.empty(0)

    def take_turns(name: str, most: int, measure: Callable[[], Way]) -> Way:
        """Let the first `most` ranks measure, while the others sleep."""
        way = measure() if comm.rank < most else Way(name, 0.0, 0, torch.empty(0))
        sleep_until_all_are_here(comm)
        return way._replace(name=name)

    for call, run in (("decode", decoded), ("encode", encoded)):
        given = latents if call == "decode" else images
        ways = [
            take_turns(
                "one rank" if n == 1 else f"{n} ranks",
                n,
                partial(_on, ranks[n], autoencoder, run, given),
            )
            for n in parts
        ]
        if call == "decode":
            ways.append(take_turns("tiles", 1, lambda: _tiled(autoencoder, size, latents)))
            images = comm.bcast(ways[0].result)
        yield Half(autoencoder.name, call, tuple(images.shape), ways)


def _on(
    comm: Any, autoencoder: Autoencoder, run: Callable[[Any, Tensor], Tensor], given: Tensor
) -> Way:
    """Return the measurement of a network cut over the ranks of `comm`, which all call it."""
    network = autoencoder.build()
    if comm.size == 1:
        return _taken(lambda: run(network, given))
    grid = dc.ProcessGrid(height=2, width=-1, comm=comm)
    dc.parallelize(network, grid)
    cut = dc.distribute_tensor(given, grid)
    own = _taken(lambda: run(network, cut))
    result: Any = own.result
    return own._replace(
        seconds=max(grid.all_gather_object(own.seconds)),
        bytes=max(grid.all_gather_object(own.bytes)),
        result=result.full_tensor(),
    )


def _tiled(autoencoder: Autoencoder, size: int, latents: Tensor) -> Way:
    """Return the measurement of decoding in diffusers' tiles of half the image's sides."""
    network = autoencoder.build()
    tile(network, autoencoder, size // 2)
    return _taken(lambda: decoded(network, latents))


def _taken(run: Callable[[], Tensor]) -> Way:
    """Return a way without a name: seconds of the second of two calls, bytes of the first."""
    gc.collect()
    most, _ = tensor_bytes(run)
    start = time.perf_counter()
    result = run()
    return Way("", time.perf_counter() - start, most, result)
