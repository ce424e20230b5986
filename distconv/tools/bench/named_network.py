"""The network that a user names, for the benchmarks of whole networks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distconv.tensor.dist_tensor import local_box
from distconv.tools.arguments import BadArguments
from distconv.tools.bench.model import result_on_meta
from distconv.tools.bench.networks import Network
from distconv.tools.bench.settings import Settings, by
from distconv.tools.factories import made, made_everywhere
from distconv.transport.world import world

_SEED = 0


def named_network(factory: str, shape: tuple[int, ...], settings: Settings) -> Network:
    """Return the network of a factory, which learns random numbers from inputs of a global shape.

    All ranks call it. The bound of its benchmarks computes it on the block of each rank.

    Parameters
    ----------
    factory: as in all commands, `package.module:factory` or `./file.py:factory`.

    Raises
    ------
    BadArguments
        On every rank, where the network does not take such an input, or a block of it, or returns
        anything but one tensor of real numbers.
    """
    if settings.extents is None and not 3 <= len(shape) <= 5:
        raise BadArguments(f"--shape {by(shape)} has no spatial dimension to cut; give a --grid")
    made_everywhere(factory, _SEED)
    block = tuple(local_box(shape, settings.grid(len(shape))).shape)

    def make(_: object) -> nn.Module:
        return made(factory, _SEED)

    network = Network(factory, make, shape, torch.rand, F.mse_loss)
    mine = _problem(network, shape) or _problem(network, block)
    for rank, problem in enumerate(world().allgather(mine)):
        if problem is not None:
            raise BadArguments(f"{factory}, on rank {rank}: {problem}")
    return network


def _problem(network: Network, shape: tuple[int, ...]) -> str | None:
    """Return why a step on an input of this shape cannot be measured; None where it can."""
    try:
        result = result_on_meta(network, shape)
    except (RuntimeError, TypeError, ValueError) as error:
        return f"an input of {by(shape)} raises {type(error).__name__}: {error}"
    if isinstance(result, Tensor) and result.is_floating_point():
        return None
    return f"it returns {type(result).__name__}; a benchmark needs one tensor of real numbers"
