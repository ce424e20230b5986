"""The seconds of Python beside local operators: of each function on distributed tensors.

In a step, the operators between two functions stream their operands through the caches, which the
code and the objects of the next function then have to be fetched into again: it takes up to ten
times as long as in a loop. So every function is timed in a chain of layers, first forward and then
backward, with passes over several numbers of bytes between them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from statistics import mean, median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from distconv.geometry.layout import default_cuts
from distconv.grid.process_grid import ProcessGrid
from distconv.model.parallelize import parallelize
from distconv.planning.dry_run import DryRunGrid
from distconv.planning.local_operators import LocalOperator
from distconv.planning.losses import OPTIMIZERS
from distconv.planning.machine import Table
from distconv.planning.operator_worker import runner
from distconv.planning.recorded_step import record_step
from distconv.planning.recording import Compute, HostWork
from distconv.tensor.dist_tensor import DistTensor, distribute_tensor
from distconv.tensor.module_call import enter_call, leave_call
from distconv.tensor.ownership import own
from distconv.transport.world import world

_PLANE = 1, 8, 16, 16
_VOLUME = 1, 8, 8, 8, 8


class _Function(NamedTuple):
    """A function whose Python is timed, on an input of a shape."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = _PLANE


class _Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        """Return the function of `x`."""
        return self._function(x)


def _of(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: _Apply(function)


_FUNCTIONS = (
    _Function(lambda: nn.Conv2d(8, 8, 3, padding=1, bias=False)),
    _Function(lambda: nn.Conv3d(8, 8, 3, padding=1, bias=False), _VOLUME),
    _Function(lambda: nn.ConvTranspose2d(8, 8, 2, 2)),
    _Function(lambda: nn.ConvTranspose3d(8, 8, 2, 2), _VOLUME),
    _Function(lambda: nn.BatchNorm2d(8)),
    _Function(lambda: nn.MaxPool2d(3, 2, 1)),
    _Function(lambda: nn.MaxPool3d(3, 2, 1), _VOLUME),
    _Function(lambda: nn.AvgPool2d(3, 2, 1)),
    _Function(lambda: nn.AvgPool3d(3, 2, 1), _VOLUME),
    _Function(lambda: nn.AdaptiveAvgPool2d(1)),
    _Function(nn.ReLU),
    _Function(nn.LeakyReLU),
    _Function(nn.Sigmoid),
    _Function(_of(lambda x: x + x)),
    _Function(_of(lambda x: torch.cat([x, x], 1))),
    _Function(lambda: nn.PixelShuffle(2)),
    _Function(lambda: nn.Flatten()),
    _Function(lambda: nn.Linear(8, 8), (4, 8)),
    _Function(_of(lambda x: F.mse_loss(x, x.detach()))),
)

_LAYERS = 8
"""Layers of a chain."""

GRIDS: tuple[Mapping[str, int], ...] = ({}, {"height": 2})


STREAMED = (0, 2**21, 2**23, 2**24, 2**25, 2**26)
"""Bytes that go through the caches before a function runs."""


def measure_host_work(rounds: int = 2) -> dict[str, Table]:
    """Return the seconds of Python by function, as `Machine.host` has them; all ranks call it.

    Each chain is gone through so many times.
    """
    host: dict[str, list[float]] = {}
    for extents in GRIDS:
        for function in _FUNCTIONS:
            for name, seconds in _measure(function, extents, rounds):
                host.setdefault(name, seconds)
    for kind in ("", " across ranks"):
        for end in ("", " backward"):
            found = [
                seconds
                for name, seconds in host.items()
                if name.endswith(f"{kind}{end}")
                and (kind or " across ranks" not in name)
                and (end or not name.endswith(" backward"))
            ]
            host[f"*{kind}{end}"] = [median(column) for column in zip(*found, strict=True)]
    for name, ranks in (("parameter", 1), ("parameter across ranks", world().size)):
        chosen = [world().rank] if ranks == 1 else None
        grid = ProcessGrid(chosen, sample=ranks, device="cpu")
        host[name] = _of_parameter(grid, rounds)
    everyone = world().allgather(host)
    sizes = tuple(map(float, STREAMED))
    return {
        name: Table(sizes, tuple(map(mean, zip(*(each[name] for each in everyone), strict=True))))
        for name in host
    }


def _measure(
    function: _Function, extents: Mapping[str, int], rounds: int
) -> Iterator[tuple[str, list[float]]]:
    """Yield the names under which a recording has a function and its adjoint, with the seconds
    behind each number of bytes of `STREAMED`."""
    module = function.make()
    options: Any = {"rank": 0, "loss": _sum, "optimizer": OPTIMIZERS["sgd"]}
    recording = record_step(module, [function.shape], extents, input_gradients=True, **options)
    layer = next(iter(recording.layers))
    operators: dict[str, list[LocalOperator]] = {"forward": [], "backward": []}
    names: dict[str, list[str]] = {"forward": [], "backward": []}
    for event in recording.events:
        if isinstance(event, Compute) and event.place.layer == layer:
            operators[event.place.phase].append(event.operator)
        elif isinstance(event, HostWork) and event.place.layer == layer:
            names[event.place.phase].append(event.function)
    passes = _passes(module, function.shape, extents, rounds)
    for phase, whole in zip(("forward", "backward"), passes, strict=True):
        if len(names[phase]) == 1:
            kernels = sum(_alone(operator) for operator in operators[phase])
            yield names[phase][0], [max(seconds - kernels, 0.0) for seconds in whole]


def _sum(output: Tensor) -> Tensor:
    return output.sum()


def _passes(
    module: nn.Module, shape: tuple[int, ...], extents: Mapping[str, int], rounds: int
) -> tuple[list[float], list[float]]:
    """Return the seconds of both passes of a module, behind each number of bytes of `STREAMED`, on
    a rank whose messages nobody gets."""
    grid = DryRunGrid(extents, 0)
    layers = [copy.deepcopy(module) for _ in range(_LAYERS)]
    own((p for layer in layers for p in layer.parameters()), grid.size)
    cuts = default_cuts(len(shape), grid.topology)
    block = torch.rand(grid.tensor(shape).shard.shape).requires_grad_()
    x = DistTensor(block, shape, cuts, grid)
    clock = time.perf_counter

    def go_through(size: int) -> tuple[list[float], list[float]]:
        forward, backward, outputs = [], [], []
        for layer in layers:
            scope = enter_call()
            try:
                stream(size)
                start = clock()
                outputs.append(layer(x))
                forward.append(clock() - start)
            finally:
                leave_call(scope)
        for layer in reversed(layers):
            y = outputs.pop().shard
            dy = torch.ones_like(y)
            inputs = [block, *layer.parameters()]
            stream(size)
            start = clock()
            torch.autograd.grad(y, inputs, dy, allow_unused=True)
            backward.append(clock() - start)
        return forward, backward

    go_through(0)
    forward, backward = [], []
    for size in STREAMED:
        passes = [go_through(size) for _ in range(rounds)]
        forward.append(median(seconds for f, _ in passes for seconds in f))
        backward.append(median(seconds for _, b in passes for seconds in b))
    return forward, backward


def _of_parameter(grid: ProcessGrid, rounds: int) -> list[float]:
    """Return the seconds of a parameter's gradient and update, behind each number of bytes."""
    trained, frozen = _Chain(), _Chain()
    for p in list(frozen.parameters())[1:]:
        p.requires_grad_(False)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.0)
    x = distribute_tensor(torch.ones(grid.size, 1), grid)
    modules = [(chain, parallelize(chain, grid)) for chain in (trained, frozen)]
    clock = time.perf_counter
    found = []
    for size in STREAMED:
        updates = []
        for chain, _ in modules:
            chain.size, chain.seconds = size, []
        for _ in range(rounds + 1):
            for _, module in modules:
                module(x).sum().backward()
            stream(size)
            start = clock()
            optimizer.step()
            optimizer.zero_grad()
            updates.append((clock() - start) / _LAYERS)
        gradient = median(trained.seconds) - median(frozen.seconds)
        found.append(median(updates) + max(gradient, 0.0))
    return found


class _Chain(nn.Module):
    """Parameters that are added up, with a note of how long the backward pass takes for each."""

    def __init__(self) -> None:
        super().__init__()
        self.summands = nn.ParameterList(torch.ones(1) for _ in range(_LAYERS))
        self.size = 0
        """The bytes that go through the caches before each summand."""
        self.seconds: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of `x` and all."""
        self.since: float | None = None
        total = torch.zeros(1)
        for p in self.summands:
            total = _Streaming.apply(total + p, self)
        return x + total


class _Streaming(Function):
    """Streams bytes through the caches in the backward pass, and notes when it does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chain: _Chain) -> Tensor:
        ctx.chain = chain
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        chain = ctx.chain
        if chain.since is not None:
            chain.seconds.append(time.perf_counter() - chain.since)
        stream(chain.size)
        chain.since = time.perf_counter()
        return dy, None


@cache
def _streamed_memory() -> Tensor:
    return torch.zeros(max(STREAMED), dtype=torch.uint8)


def stream(size: int) -> None:
    """Let so many bytes go through the caches."""
    _streamed_memory()[:size].add_(1)


def _alone(operator: LocalOperator) -> float:
    """Return the seconds of a tiny operator by itself."""
    run = runner(operator)
    clock = time.perf_counter
    with torch.no_grad():
        times = []
        for _ in range(15):
            start = clock()
            run()
            times.append(clock() - start)
    return median(times)
