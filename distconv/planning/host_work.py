"""The seconds of Python beside local operators: of each function on distributed tensors.

In a step, the functions between two of a kind run through the caches, and their operators stream
their operands through, so that the code and the objects of the next function have to be fetched
again: it takes up to ten times as long as in a loop. So every function is timed in a chain of
layers, first forward and then backward, with other functions and passes over several numbers of
bytes between them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Mapping
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
from distconv.ops.support.method import method
from distconv.planning.dry_run import DryRunGrid
from distconv.planning.machine import Table
from distconv.planning.operator_calls import Operands, call_of
from distconv.planning.recorded_step import OPTIMIZERS, record_step
from distconv.planning.recording import Compute, HostWork, LocalOperator
from distconv.tensor.dist_tensor import DistTensor, distribute_tensor
from distconv.tensor.module_call import enter_call
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

WAYS: tuple[tuple[Mapping[str, int], str], ...] = (
    ({}, "assembled"),
    ({"height": 2}, "assembled"),
    ({"height": 2}, "overlapped"),
)
"""Grids and methods by which functions are computed."""


STREAMED = (0, 2**22, 2**24, 2**26)
"""Bytes that go through the caches before a function runs."""


def measure_host_work(layers: int = 16) -> dict[str, Table]:
    """Return the seconds of Python by function, as `Machine.host` has them; all ranks call it.

    Each chain has so many layers.
    """
    host: dict[str, list[float]] = {}
    for extents, way in WAYS:
        others = _Others(DryRunGrid(extents, 0))
        for function in _FUNCTIONS:
            with method(way):
                host |= _measure(function, extents, others, layers, host)
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
        host[name] = _of_parameter(grid, layers)
    everyone = world().allgather(host)
    sizes = tuple(map(float, STREAMED))
    return {
        name: Table(sizes, tuple(map(mean, zip(*(each[name] for each in everyone), strict=True))))
        for name in host
    }


class _Others:
    """Functions that run between two of the functions that are timed.

    Attributes
    ----------
    memory: for the operands of local operators.
    """

    def __init__(self, grid: DryRunGrid):
        self._network = nn.Sequential(
            nn.Conv2d(4, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ELU(),
            nn.MaxPool2d(2),
            nn.ConvTranspose2d(6, 4, 2, 2),
            nn.Hardtanh(),
        )
        own(self._network.parameters(), grid.size)
        self._input = _with_elements((1, 4, 8, 8), grid)
        self.memory = Operands([])

    def run(self) -> None:
        """Run them forward and, where gradients are recorded, backward."""
        scope = enter_call()
        try:
            y = self._network(self._input).shard
        finally:
            scope.leave()
        if y.requires_grad:
            torch.autograd.grad(y, list(self._network.parameters()), torch.ones_like(y))


def _with_elements(shape: tuple[int, ...], grid: DryRunGrid) -> DistTensor:
    """Return a tensor on a grid that is not there, whose block has elements and a gradient."""
    block = torch.rand(grid.tensor(shape).shard.shape).requires_grad_()
    return DistTensor(block, shape, default_cuts(len(shape), grid.topology), grid)


def _measure(
    function: _Function,
    extents: Mapping[str, int],
    others: _Others,
    layers: int,
    known: Collection[str],
) -> dict[str, list[float]]:
    """Return the seconds of a function and of its adjoint behind each number of bytes of
    `STREAMED`, by the names that recordings have for them; nothing of those that are known."""
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
    wanted = {p: each[0] for p, each in names.items() if len(each) == 1 and each[0] not in known}
    if not wanted:
        return {}
    passes = _passes(module, function.shape, extents, others, layers)
    found = {}
    for phase, name in wanted.items():
        kernels = sum(_alone(operator, others) for operator in operators[phase])
        found[name] = [max(seconds - kernels, 0.0) for seconds in passes[phase]]
    return found


def _sum(output: Tensor) -> Tensor:
    return output.sum()


def _passes(
    module: nn.Module,
    shape: tuple[int, ...],
    extents: Mapping[str, int],
    others: _Others,
    layers: int,
) -> dict[str, list[float]]:
    """Return the seconds of both passes of a module, behind other functions and each number of
    bytes of `STREAMED`, on a rank whose messages nobody gets."""
    grid = DryRunGrid(extents, 0)
    chain = [copy.deepcopy(module) for _ in range(layers)]
    own((p for layer in chain for p in layer.parameters()), grid.size)
    x = _with_elements(shape, grid)
    clock = time.perf_counter

    def go_through(size: int) -> tuple[list[float], list[float]]:
        forward, backward, outputs = [], [], []
        for layer in chain:
            others.run()
            scope = enter_call()
            try:
                stream(size)
                start = clock()
                outputs.append(layer(x))
                forward.append(clock() - start)
            finally:
                scope.leave()
        for layer in reversed(chain):
            y = outputs.pop().shard
            dy = torch.ones_like(y)
            inputs = [x.shard, *layer.parameters()]
            others.run()
            stream(size)
            start = clock()
            torch.autograd.grad(y, inputs, dy, allow_unused=True)
            backward.append(clock() - start)
        return forward, backward

    go_through(0)
    found: dict[str, list[float]] = {"forward": [], "backward": []}
    for size in STREAMED:
        for phase, seconds in zip(found, go_through(size), strict=True):
            found[phase].append(median(seconds))
    return found


def _of_parameter(grid: ProcessGrid, layers: int) -> list[float]:
    """Return the seconds of a parameter's gradient and update, behind other functions and each
    number of bytes."""
    others = _Others(DryRunGrid({}, 0))
    trained, frozen = _Chain(layers, others), _Chain(layers, others)
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
        for _ in range(3):
            for _, module in modules:
                module(x).sum().backward()
            others.run()
            stream(size)
            start = clock()
            optimizer.step()
            optimizer.zero_grad()
            updates.append((clock() - start) / layers)
        gradient = median(trained.seconds) - median(frozen.seconds)
        found.append(median(updates) + max(gradient, 0.0))
    return found


class _Chain(nn.Module):
    """Parameters that are added up, with a note of how long the backward pass takes for each."""

    def __init__(self, layers: int, others: _Others) -> None:
        super().__init__()
        self.others = others
        self.summands = nn.ParameterList(torch.ones(1) for _ in range(layers))
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
    """Notes when the backward pass arrives, and lets others use the caches before it goes on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chain: _Chain) -> Tensor:
        ctx.chain = chain
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        chain = ctx.chain
        if chain.since is not None:
            chain.seconds.append(time.perf_counter() - chain.since)
        chain.others.run()
        stream(chain.size)
        chain.since = time.perf_counter()
        return dy, None


@cache
def _streamed_memory() -> Tensor:
    return torch.zeros(max(STREAMED), dtype=torch.uint8)


def stream(size: int) -> None:
    """Let so many bytes go through the caches."""
    _streamed_memory()[:size].add_(1)


def _alone(operator: LocalOperator, others: _Others) -> float:
    """Return the seconds of a tiny operator by itself, behind other functions."""
    clock = time.perf_counter
    times = []
    for _ in range(10):
        others.run()
        with torch.no_grad():
            run = call_of(operator, others.memory)
            start = clock()
            run()
            times.append(clock() - start)
    return median(times[2:])
