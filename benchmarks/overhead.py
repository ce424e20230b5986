"""The cost of distconv beside the computing: microseconds of Python on tensors so small that the
kernels take next to nothing, minus the same kernels called directly; and a model on a single rank.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.halo import plan_of, sendrecv
from benchmarks.layer import step_of
from benchmarks.measuring.report import Row, minus, over
from benchmarks.measuring.settings import Settings, by, chain
from benchmarks.measuring.turns import alternate
from distconv.geometry.index_maps import Same, Window
from distconv.geometry.layout import default_cuts, rank_box
from distconv.geometry.plan import make_plan
from distconv.geometry.topology import Topology
from distconv.grid.process_grid import ProcessGrid
from distconv.model.parallelize import parallelize
from distconv.ops.conv.functions import method
from distconv.planning.dry_run import DryRunGrid
from distconv.planning.scaling import Contender, spread
from distconv.tensor.dist_tensor import DistTensor, distribute_tensor
from distconv.transport.launch import mpi

POINTWISE: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    ("relu(x)", torch.relu),
    ("x + x", lambda x: x + x),
    ("x * 2", lambda x: x * 2),
)
_CHANNELS, _ROWS, _WIDTH = 8, 8, 16
"""Channels of the tiny plane, rows of every rank, and columns."""


def overheads(settings: Settings) -> Iterator[Row]:
    """Yield all rows, on chains of ranks whatever the settings; all ranks call it."""
    torch.manual_seed(0)
    grid = chain("height")
    shape = (1, _CHANNELS, _ROWS * grid.size, _WIDTH)
    yield from pointwise(settings, grid, shape)
    if grid.size > 1:
        yield from convolutions(settings, grid, shape)
    yield plan()
    yield one_rank(settings)


def pointwise(settings: Settings, grid: ProcessGrid, shape: tuple[int, ...]) -> Iterator[Row]:
    """Yield rows of element-wise operators on a DistTensor, over those on the block alone."""
    x = distribute_tensor(torch.randn(shape), grid)
    for name, function in POINTWISE:
        sides = [
            Contender(lambda f=function, o=operand: f(o), settings.threads)  # type: ignore[misc]
            for operand in (x, x.shard)
        ]
        times = alternate(grid.comm, sides, settings.seconds)
        row = "overhead", f"dispatch of {name}", settings.configuration(grid, by(shape))
        yield minus(row, "minus torch on the block", times[0], times[1], 10.0)


def convolutions(settings: Settings, grid: ProcessGrid, shape: tuple[int, ...]) -> Iterator[Row]:
    """Yield rows of a cut 3x3 convolution, both passes, over its kernels and messages alone.

    Once with messages, for which the ranks wait as long as the system lets them; and once on a grid
    that sends nothing, which is Python alone.
    """
    weight = torch.randn(_CHANNELS, _CHANNELS, 3, 3, requires_grad=True)
    cuts = default_cuts(len(shape), grid.topology)
    block = torch.randn(rank_box(shape, cuts, grid.topology, grid.rank).shape)
    dy = torch.randn(block.shape)
    for name, on, measure in (
        ("host work", grid, "minus its kernels and Sendrecv"),
        ("host work, nothing sent", DryRunGrid(grid.shape, grid.rank), "minus its kernels"),
    ):
        x = DistTensor(block.clone(), shape, cuts, on).requires_grad_()
        messages = sendrecv(plan_of(x), grid) if on is grid else lambda: None
        runs = cut_convolution(x, weight, dy), kernels(x, weight.detach(), dy, messages)
        with method("overlapped"):
            times = alternate(
                grid.comm, [Contender(r, settings.threads) for r in runs], settings.seconds
            )
        configuration = settings.configuration(grid, f"{by(shape)}, forward and backward")
        row = "overhead", f"conv2d, {_CHANNELS} -> {_CHANNELS}, 3x3: {name}", configuration
        yield minus(row, measure, times[0], times[1], 150.0)


def cut_convolution(x: DistTensor, weight: Tensor, dy: Tensor) -> Callable[[], None]:
    """Return a 3x3 convolution of `x`, and its gradients for a gradient of this rank's outputs."""

    def run() -> None:
        y = F.conv2d(x, weight, padding=1)
        assert isinstance(y, DistTensor)
        torch.autograd.grad(y.shard, (x.shard, weight), dy)

    return run


def kernels(
    x: DistTensor, weight: Tensor, dy: Tensor, messages: Callable[[], None]
) -> Callable[[], None]:
    """Return a function that runs the kernels and messages of `cut_convolution` alone."""
    local = x.shard.detach()
    sides = [(slice(0, 1), slice(0, 1))] if x.grid.rank > 0 else []
    sides += [(slice(-1, None), slice(2, 3))] if x.grid.rank < x.grid.size - 1 else []
    halo = torch.randn(1, _CHANNELS, 1, _WIDTH)
    backward: Any = torch.ops.aten.convolution_backward
    rest = (1, 1), False, (0, 0), 1
    inner, outer = ((1, 1), (1, 1), *rest), ((1, 1), (0, 1), *rest)
    mask = [True, True, False]

    def run() -> None:
        y = torch.convolution(local, weight, None, *inner)
        messages()
        for rows, taps in sides:
            y[:, :, rows].add_(torch.convolution(halo, weight[:, :, taps], None, *outer))
        for rows, taps in sides:
            backward(dy[:, :, rows], halo, weight[:, :, taps], None, *outer, mask)
        backward(dy, local, weight, None, *inner, mask)
        messages()

    return run


def plan(samples: int = 100) -> Row:
    """Return the row of the time to plan a 3^3 convolution, for one after another of 16^3 ranks."""
    topology = Topology((1, 1, 1, 16, 16, 16))
    shape, cuts = (1, 16, 512, 512, 512), ((), (), ("depth",), ("height",), ("width",))
    needs = (Same(), Same(), *(Window(3, padding=(1, 1)),) * 3)
    times = []
    for d, h, w in itertools.islice(itertools.product(range(1, 15), repeat=3), samples):
        rank = (d * 16 + h) * 16 + w
        start = time.perf_counter()
        make_plan.__wrapped__(topology, rank, shape, cuts, cuts, needs)
        times.append(time.perf_counter() - start)
    middle = spread(times)
    return Row(
        "overhead",
        "plan for one rank of 16x16x16",
        f"{by(shape)}, 3^3, uncached, 26 neighbours",
        "time",
        "ms",
        middle.median * 1e3,
        middle.low * 1e3,
        middle.high * 1e3,
        rounds=len(times),
        subject=middle.median,
        target=2.0,
    )


def one_rank(settings: Settings, channels: int = 32, size: int = 128, depth: int = 3) -> Row:
    """Return the row of a stack of layers on a grid of rank 0 alone, over the plain stack."""
    shape = 1, channels, size, size

    def stack() -> nn.Module:
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.ReLU()]
            layers += [nn.BatchNorm2d(channels)]
        return nn.Sequential(*layers)

    torch.manual_seed(0)
    x, dy = torch.randn(shape), torch.randn(shape)
    grid = ProcessGrid(mpi().COMM_SELF, device="cpu")
    module = parallelize(stack(), grid)
    subject = step_of(module, distribute_tensor(x, grid), distribute_tensor(dy, grid))
    sides = [
        Contender(run, settings.threads, ranks=1) for run in (subject, step_of(stack(), x, dy))
    ]
    times = alternate(mpi().COMM_WORLD, sides, settings.seconds)
    name = f"{depth} x (convolution, ReLU, batch norm), {size}^2"
    configuration = settings.configuration(grid, f"{by(shape)}, forward and backward")
    return over(("overhead", name, configuration), "over plain torch", times[0], times[1], 1.03)
