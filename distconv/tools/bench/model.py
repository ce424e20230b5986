"""A training step of a whole network, against the same with no communication, and one rank.

A step is forward, loss, backward with the sum of the parameters' gradients, and SGD.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distconv.geometry.layout import Layout, default_cuts
from distconv.grid.process_grid import ProcessGrid
from distconv.model.parallelize import parallelize
from distconv.planning.alternation import Contender, alternate
from distconv.tensor.dist_tensor import DistTensor, local_box
from distconv.tensor.sample_format import in_sample_format
from distconv.tools.bench.networks import NETWORKS, Network
from distconv.tools.bench.report import Row, over, speedup
from distconv.tools.bench.settings import Settings, by


def models(settings: Settings, networks: Sequence[Network] = NETWORKS) -> Iterator[Row]:
    """Yield two rows for each network; all ranks call it.

    Without communication the plain network trains on a sample of the shape of the rank's block,
    with batch norm over that.
    """
    for network in networks:
        grid = settings.grid(len(network.shape))
        torch.manual_seed(0)
        spatial = network.shape[2:]
        block = local_box(network.shape, grid).shape
        distributed = parallelize(network.make(spatial), grid)
        step = step_of(network, distributed, *cut_sample(network, grid))
        local = step_of(network, network.make(block[2:]), *sample(network, block))
        serial = step_of(network, network.make(spatial), *sample(network, network.shape))
        threads = settings.threads * grid.size
        sides = (
            Contender(step, settings.threads),
            Contender(local, settings.threads),
            Contender(serial, threads, ranks=1),
        )
        times = alternate(grid.comm, sides, settings.seconds)
        where = *network.remarks, by(network.shape), f"{by(block)} on rank 0"
        row = "model", network.name, settings.configuration(grid, *where)
        yield over(row, "over no communication", times[0], times[1], network.over_local)
        measure = f"speed-up over serial torch, {threads} threads"
        yield speedup(row, measure, times[0], times[2], 1.0)


def sample(network: Network, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return a random input of this shape, and the target that the network should predict."""
    y = network.target(tuple(result_on_meta(network, shape).shape))
    return torch.randn(shape), y


def result_on_meta(network: Network, shape: tuple[int, ...]) -> Any:
    """Return the result of the network for an input of this shape, without elements."""
    with torch.device("meta"), torch.no_grad():
        return network.make(shape[2:])(torch.empty(shape))


def cut_sample(network: Network, grid: ProcessGrid) -> tuple[DistTensor, DistTensor]:
    """Return such a sample as DistTensors, of which a rank never holds more than its block."""
    ndim = len(network.shape)
    # A target that is not cut has to be the same on all ranks.
    torch.manual_seed(0)
    x, y = sample(network, local_box(network.shape, grid).shape)
    layout = None
    if y.dim() == ndim - 1:
        # One class for each position, without a dimension of channels.
        samples, _, *spatial = default_cuts(ndim, grid.topology)
        layout = Layout.of((samples, *spatial))
    return _cut(x, grid, None), _cut(y, grid, layout)


def _cut(block: Tensor, grid: ProcessGrid, layout: Layout | None) -> DistTensor:
    """Return the DistTensor of a rank's block, which lies in memory as a loader leaves it."""
    x = DistTensor.from_local(block, grid, layout)
    return DistTensor(in_sample_format(block, x.shape, x.cuts, grid), x.shape, x.cuts, grid)


def step_of(
    network: Network, module: nn.Module, x: Tensor, y: Tensor, rate: float = 1e-3
) -> Callable[[], None]:
    """Return a step of training on one sample at a learning rate, plain or distributed."""
    optimizer = torch.optim.SGD(module.parameters(), lr=rate)

    def step() -> None:
        optimizer.zero_grad()
        network.loss(module(x), y).backward()
        optimizer.step()

    return step
