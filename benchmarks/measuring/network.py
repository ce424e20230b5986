"""A network that is measured, and training steps of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measuring.settings import Settings, by
from distconv.compiling.front import compile
from distconv.geometry.layout import Cuts, default_cuts
from distconv.grid.interface import Grid
from distconv.grid.process_grid import ProcessGrid
from distconv.grid.ranks import world
from distconv.tensor.dist_tensor import DistTensor, local_box
from distconv.tensor.memory_format import in_sample_format
from distconv.tools.command_line import BadArguments, made_everywhere, module_from

_SEED = 0


class Network(NamedTuple):
    """A network, the shape of a training sample, and its target."""

    name: str
    make: Callable[[Sequence[int]], nn.Module]
    """Makes the network for an input of these spatial sizes."""
    shape: tuple[int, ...]
    """The global shape of the input."""
    target: Callable[[tuple[int, ...]], Tensor] = torch.rand
    """Makes the target from the shape of the network's output."""
    loss: Callable[[Tensor, Tensor], Tensor] = F.mse_loss
    over_plain: float | None = None
    """The longest that a step should take, in times of the best plain torch on the block."""
    remarks: tuple[str, ...] = ()
    """Words for its configuration."""


def sample(network: Network, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return a random input of this shape, and the target that the network should predict."""
    y = network.target(tuple(result_on_meta(network, shape).shape))
    return torch.randn(shape), y


def result_on_meta(network: Network, shape: tuple[int, ...]) -> Any:
    """Return the result of the network for an input of this shape, without elements."""
    with torch.device("meta"), torch.no_grad():
        return network.make(shape[2:])(torch.empty(shape))


def cut_sample(network: Network, grid: ProcessGrid) -> tuple[DistTensor, DistTensor]:
    """Return a random input and its target as DistTensors in the memory format of a loader's."""
    made = result_on_meta(network, network.shape).shape
    x, y = (
        DistTensor(in_sample_format(t.shard, t.shape, t.cuts, grid), t.shape, t.cuts, grid)
        for t in cut_blocks(network.shape, made, network.target, grid)
    )
    return x, y


def cut_blocks(
    shape: Sequence[int],
    made: Sequence[int],
    target: Callable[[tuple[int, ...]], Tensor],
    grid: Grid,
) -> tuple[DistTensor, DistTensor]:
    """Return a random input of the global shape `shape`, and a target for the network's output.

    Each rank makes its own blocks alone.

    Parameters
    ----------
    made: the global shape of the output.
    target: makes the target from the shape of an output.
    """
    with torch.device("meta"):
        whole = target(tuple(made)).shape
    cuts = target_cuts(len(whole), len(made), grid)
    # A target that is not cut has to be the same on all ranks.
    torch.manual_seed(0)
    x = torch.randn(local_box(shape, grid).shape)
    y = target(tuple(local_box(made, grid).shape))
    return (
        DistTensor(x, shape, default_cuts(len(shape), grid.topology), grid),
        DistTensor(y, whole, cuts, grid),
    )


def target_cuts(ndim: int, made: int, grid: Grid) -> Cuts:
    """Return the cuts of a target of `ndim` dimensions: those of an output of `made` dimensions,
    without the channels for labels."""
    cuts = default_cuts(made, grid.topology)
    return cuts if ndim == made else (cuts[0], *cuts[2:])


def sgd_step(
    network: Network,
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    rate: float = 1e-3,
    compiled: bool = False,
) -> Callable[[], None]:
    """Return a training step on one sample, plain or distributed: forward, loss, backward, SGD.

    `compiled` lets `distconv.compile` take the network and its loss.
    """
    optimizer = torch.optim.SGD(module.parameters(), lr=rate)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return network.loss(module(x), y)

    compute = compile(loss_of) if compiled else loss_of

    def step() -> None:
        optimizer.zero_grad()
        compute(x, y).backward()
        optimizer.step()

    return step


def named_network(factory: str, shape: tuple[int, ...], settings: Settings) -> Network:
    """Return the network of a factory, which learns random numbers from inputs of a global shape.

    All ranks call it.

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
    network = Network(factory, lambda spatial: module_from(factory, _SEED), shape)
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
