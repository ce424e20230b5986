"""Where a training step loses time to being cut: the same step with more and more of it left out.

The bound is the plain network on a block of the same shape. From one variant of the step to the
next one thing is left out, so that the differences add up to the loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack

import torch
from torch import Tensor, nn

from distconv.grid.communicators import carried_by
from distconv.grid.process_grid import ProcessGrid
from distconv.model.parallelize import parallelize
from distconv.planning.alternation import Contender, alternate
from distconv.tensor.dist_tensor import local_box
from distconv.tools.bench import left_out
from distconv.tools.bench.model import cut_sample, sample, step_of
from distconv.tools.bench.networks import NETWORKS, Network, UNet3d
from distconv.tools.bench.report import Row, over, share
from distconv.tools.bench.settings import Settings, by
from distconv.tools.bench.silent import SilentTransport
from distconv.transport.launch import mpi


def residual(channels: int = 32, depth: int = 17, norm: bool = True) -> nn.Module:
    """Return a chain of 3x3 convolutions, each added to what it gets, as residual networks have."""
    return nn.Sequential(*(_Residual(channels, norm) for _ in range(depth)))


class _Residual(nn.Module):
    def __init__(self, channels: int, norm: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=not norm)
        self.norm = nn.BatchNorm2d(channels) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of `x` and what the layer makes of it."""
        return x + self.norm(self.convolution(x)).relu()


class UNet2d(nn.Module):
    """A 2-D U-Net of three levels with two convolutions each, from 3 channels to 2 classes."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            _level(3, width),
            _level(width, 2 * width),
            _level(2 * width, 4 * width),
        )
        self.up_second = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.up_first = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.merge_second, self.merge_first = _level(4 * width, 2 * width), _level(2 * width, width)
        self.head, self.pool = nn.Conv2d(width, 2, 1), nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        """Map planes (samples, 3, H, W) to logits (samples, 2, H, W)."""
        first = self.first(x)
        second = self.second(self.pool(first))
        third = self.third(self.pool(second))
        second = self.merge_second(torch.cat([second, self.up_second(third)], 1))
        return self.head(self.merge_first(torch.cat([first, self.up_first(second)], 1)))


def _level(channels: int, width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for entering in (channels, width):
        layers += [nn.Conv2d(entering, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
        layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def _regression(
    name: str, make: Callable[[], nn.Module], shape: tuple[int, ...], most: float
) -> Network:
    return Network(name, lambda spatial: make(), shape, torch.rand, nn.functional.mse_loss, most)


CASES = (
    _regression("2-D U-Net, 256^2", UNet2d, (1, 3, 256, 256), 1.08),
    _regression("residual, 32 channels, 128^2", residual, (1, 32, 128, 128), 1.08),
    _regression("3-D U-Net, 48^3", UNet3d, (1, 1, 48, 48, 48), 1.08),
    NETWORKS[0]._replace(over_local=1.08),
    NETWORKS[2]._replace(over_local=1.10),
    _regression(
        "residual, 128 channels, 32^2", lambda: residual(128, 4, False), (1, 128, 32, 32), 1.15
    ),
)
"""The networks that are taken apart, with what their step should take at the most over the bound.
"""


def losses(settings: Settings, networks: Sequence[Network] = CASES) -> Iterator[Row]:
    """Yield for each network its loss, and the rows that add up to it; all ranks of MPI call it."""
    for network in networks:
        grid = settings.grid(len(network.shape))
        block = local_box(network.shape, grid).shape
        sides = [Contender(run, settings.threads) for run in variants(network, grid)]
        times = alternate(grid.comm, sides, settings.seconds)
        where = f"{by(network.shape)}, {by(block)} on rank 0"
        row = "loss", network.name, settings.configuration(grid, where)
        yield over(row, "over the block alone", times[0], times[-1], network.over_local)
        for part, with_it, without in zip(PARTS, times, times[1:], strict=False):
            yield share(row, part, with_it, without, times[-1])


def variants(network: Network, grid: ProcessGrid) -> list[Callable[[], None]]:
    """Return the training step of a network, and the same with less and less of it, down to a grid
    of one rank and to plain torch; all ranks of the grid call it.

    What is left out from one to the next is in `PARTS`.
    """
    alone = ProcessGrid(mpi().COMM_SELF, device="cpu")
    torch.manual_seed(0)
    block = local_box(network.shape, grid).shape
    on_block = network._replace(shape=tuple(block))
    on_grid = cut_sample(network, grid)
    step = unchanging_step(network, parallelize(made(network), grid), *on_grid)
    in_parts = left_out.sums_of_gradients(made(network), grid.size)
    without_sums = unchanging_step(network, in_parts, *on_grid)
    of_one_rank = unchanging_step(
        network, parallelize(made(on_block), alone), *cut_sample(on_block, alone)
    )
    norm, boundaries = left_out.statistics_of_all_ranks(), left_out.boundaries()
    return [
        step,
        silenced(step, collectives=False),
        silenced(step, collectives=True),
        silenced(without(step, norm), collectives=True),
        silenced(without(step, norm, boundaries), collectives=True),
        silenced(without(without_sums, norm, boundaries), collectives=True),
        of_one_rank,
        unchanging_step(network, made(on_block), *sample(network, block)),
    ]


PARTS = (
    "halos and redistributions: messages and waiting",
    "reductions and gathers: messages and waiting",
    "batch norm over all ranks",
    "boundaries of overlapped convolutions",
    "hooks and buckets of parameters",
    "other work of a cut network",
    "Python and kernels of one rank",
)
"""The differences between one variant and the next."""


def made(network: Network) -> nn.Module:
    """Return the network for its sample's shape, with statistics that stay as they are."""
    module = network.make(network.shape[2:])
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d | nn.BatchNorm3d):
            part.momentum = 0.0
    return module


def unchanging_step(
    network: Network, module: nn.Module, x: Tensor, y: Tensor
) -> Callable[[], None]:
    """Return a step that computes all and changes nothing: without sums, ranks would drift apart,
    which the parallelized module takes for an error."""
    return step_of(network, module, x, y, rate=0.0)


def without(step: Callable[[], None], *parts: AbstractContextManager[object]) -> Callable[[], None]:
    """Return a step of which parts are left out."""

    def run() -> None:
        with ExitStack() as stack:
            for part in parts:
                stack.enter_context(part)
            step()

    return run


def silenced(step: Callable[[], None], collectives: bool) -> Callable[[], None]:
    """Return a step that sends no halos, or nothing at all."""

    def run() -> None:
        with carried_by(lambda carrier: SilentTransport(carrier, collectives)):
            with warnings.catch_warnings():
                # Sums of one rank alone look like gradients that the others lack.
                warnings.simplefilter("ignore")
                step()

    return run
