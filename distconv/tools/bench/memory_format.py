"""Networks with channels last in all of memory, against the same as they are by default, and halos
with channels last, against channels first.

By default, networks on planes have channels last from their first convolution on, where the sample
has few channels (`ops/conv/planes.py`). The elements of all channels at one position then lie side
by side, so that a column of a cut width is a run for each row. With channels first each of its
elements lies on a cache line of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from distconv.grid.process_grid import ProcessGrid
from distconv.model.parallelize import parallelize
from distconv.planning.alternation import Contender, alternate
from distconv.tensor.dist_tensor import DistTensor
from distconv.tools.arguments import BadArguments
from distconv.tools.bench.halo import CASES as HALOS
from distconv.tools.bench.halo import block_of, exchange, plan_of
from distconv.tools.bench.loss import CASES as NETWORKS
from distconv.tools.bench.model import cut_sample, step_of
from distconv.tools.bench.networks import Network
from distconv.tools.bench.report import Row, over
from distconv.tools.bench.settings import Settings, by, chain

OF_NETWORKS = "channels last over the default"
OF_HALOS = "channels last over channels first"


def memory_formats(
    settings: Settings,
    networks: Sequence[Network] = NETWORKS,
    halos: Sequence[tuple[str, int, int]] = HALOS,
) -> Iterator[Row]:
    """Yield a row for each network on each grid, then one for each exchange of halos.

    The grid is that of the settings, or else the chain of all ranks along the height, and then
    along the width. All ranks call it.
    """
    for network in networks:
        chosen = None if settings.extents is None else settings.grid(len(network.shape))
        for grid in (chain("height"), chain("width")) if chosen is None else (chosen,):
            runs = [_step(network, grid, last) for last in (True, False)]
            told = *network.remarks, by(network.shape)
            yield _row(settings, grid, network.name, told, OF_NETWORKS, runs)
    for axis, channels, extent in halos:
        grid = chain(axis)
        block = torch.randn(block_of(axis, channels, extent))
        runs = []
        for x in (block.to(memory_format=_last(4)), block):
            cut = DistTensor.from_local(x, grid)
            runs.append(exchange(cut, plan_of(cut)))
        told = (f"{by(block.shape)} a rank",)
        yield _row(settings, grid, "halos of 3x3", told, OF_HALOS, runs)


def _row(
    settings: Settings,
    grid: ProcessGrid,
    case: str,
    more: Sequence[str],
    measure: str,
    runs: Sequence[Callable[[], None]],
) -> Row:
    sides = [Contender(run, settings.threads) for run in runs]
    last, first = alternate(grid.comm, sides, settings.seconds)
    told = "memory_format", case, settings.configuration(grid, *more)
    return over(told, measure, last, first, None)


def _step(network: Network, grid: ProcessGrid, last: bool) -> Callable[[], None]:
    """Return a training step of a network whose weights, samples and targets have one format."""
    torch.manual_seed(0)
    module = network.make(network.shape[2:])
    x, y = cut_sample(network, grid)
    if last:
        module.to(memory_format=_last(x.dim()))  # type: ignore[call-overload]
        x, y = (_with_channels_last(t, grid) if t.dim() == x.dim() else t for t in (x, y))
    return step_of(network, parallelize(module, grid), x, y)


def _with_channels_last(x: DistTensor, grid: ProcessGrid) -> DistTensor:
    return DistTensor.from_local(x.shard.to(memory_format=_last(x.dim())), grid, x.layout)


def _last(ndim: int) -> torch.memory_format:
    """Return torch's word for channels last in tensors of `ndim` dimensions."""
    if ndim not in (4, 5):
        raise BadArguments(f"torch has channels last for planes and volumes, not for {ndim - 2}-d")
    return torch.channels_last if ndim == 4 else torch.channels_last_3d
