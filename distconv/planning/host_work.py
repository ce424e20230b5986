"""Measure the seconds of Python that each function on DistTensors takes beside its kernels.

In a step, other functions run between two calls of a function, and operators stream their operands
through the caches. The code and objects of a function must then be fetched again for each call,
which takes up to ten times as long as in a loop. Every function is therefore timed in a chain of
layers, first forward and then backward, with other functions and passes over several numbers of
bytes between the calls.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from statistics import mean, median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from distconv.geometry.layout import default_cuts
from distconv.grid.process_grid import ProcessGrid
from distconv.grid.ranks import world
from distconv.model.parallelize import parallelize
from distconv.ops.conv.functions import method
from distconv.planning.dry_run import DryRunGrid
from distconv.planning.machine import Table, kind_of_function
from distconv.planning.operators import Operands, call_of
from distconv.planning.recorded_step import record_step
from distconv.planning.recording import Compute, HostWork, LocalOperator
from distconv.tensor.dispatch import enter_call
from distconv.tensor.dist_tensor import DistTensor, distribute_tensor
from distconv.tensor.ownership import own


class _Apply(nn.Module):
    """A layer that calls `function`, so that a function such as a sum is timed like a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.forward = function


def _layers() -> list[tuple[nn.Module, tuple[int, ...]]]:
    """Return layers that call the functions to be timed, each with the shape of its input."""
    planes = (
        *(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.ConvTranspose2d(8, 8, 2, 2)),
        *(nn.BatchNorm2d(8), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 2, 1)),
        *(nn.AdaptiveAvgPool2d(1), nn.ReLU(), nn.LeakyReLU(), nn.Sigmoid()),
        *(nn.PixelShuffle(2), nn.Flatten(), _Apply(lambda x: x + x)),
        *(_Apply(lambda x: torch.cat([x, x], 1)), _Apply(lambda x: F.mse_loss(x, x.detach()))),
    )
    volumes = (
        *(nn.Conv3d(8, 8, 3, padding=1, bias=False), nn.ConvTranspose3d(8, 8, 2, 2)),
        *(nn.MaxPool3d(3, 2, 1), nn.AvgPool3d(3, 2, 1)),
    )
    return [
        *((layer, (1, 8, 16, 16)) for layer in planes),
        *((layer, (1, 8, 8, 8, 8)) for layer in volumes),
        (nn.Linear(8, 8), (4, 8)),
    ]


WAYS: tuple[tuple[Mapping[str, int], str], ...] = (
    ({"sample": 2}, "assembled"),
    ({"height": 2}, "assembled"),
    ({"height": 2}, "overlapped"),
)
"""Grids and methods of convolution with which functions are timed, the first without messages. None
has a single rank, on which some functions would skip their rules."""

STREAMED = (0, 2**22, 2**24, 2**26)
"""Numbers of bytes that are read and written before a timed call, to displace the caches'
contents."""

_FOR_MANY = 22.0
"""The approximate seconds to time 16 copies of every layer on an idle machine."""


def measure_host_work(seconds: float) -> dict[str, Table]:
    """Return the seconds of Python of each function on DistTensors. Collective.

    The functions are those of common layers, such as convolutions, pooling and norms, and the
    gradient and update of a parameter. The result is for `Machine.host`: a table for each function,
    by the bytes passed through the caches before a call. Each time is a median over several copies
    of a layer. After `seconds` no further layers are measured; entries such as "*" have the median
    time, for functions that are not measured.
    """
    end = time.perf_counter() + seconds
    copies = 16 if seconds >= _FOR_MANY else 2
    host: dict[str, list[float]] = {}
    others = [(_InterveningNetwork(DryRunGrid(extents, 0)), way) for extents, way in WAYS]
    for layer, shape in _layers():
        for around, way in others:
            if way != "overlapped" or "Conv" in type(layer).__name__:
                with method(way):
                    host = _measure(layer, shape, around, copies) | host
        if any(world().allgather(time.perf_counter() > end)):
            break
    of_kinds: defaultdict[str, list[list[float]]] = defaultdict(list)
    for name, times in host.items():
        of_kinds[kind_of_function(name)].append(times)
    for kind, found in of_kinds.items():
        host[kind] = [median(column) for column in zip(*found, strict=True)]
    for name, ranks in (("parameter", 1), ("parameter across ranks", world().size)):
        chosen = [world().rank] if ranks == 1 else None
        host[name] = _of_parameter(ProcessGrid(chosen, sample=ranks, device="cpu"), copies)
    everyone = world().allgather(host)
    sizes = tuple(map(float, STREAMED))
    return {
        name: Table(sizes, tuple(map(mean, zip(*(each[name] for each in everyone), strict=True))))
        for name in host
    }


class _InterveningNetwork:
    """A small network to run between two calls of a timed function, like other layers of a step."""

    def __init__(self, grid: DryRunGrid):
        self.grid = grid
        self._network = nn.Sequential(
            *(nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ELU(), nn.MaxPool2d(2)),
            *(nn.ConvTranspose2d(6, 4, 2, 2), nn.Hardtanh()),
        )
        own(self._network.parameters(), grid.size)
        self._input = _with_elements((1, 4, 8, 8), grid)
        self.memory = Operands([])

    def run(self, streamed: int = 0) -> None:
        """Displace the caches' contents: run forward, backward, and a pass over `streamed` bytes.

        The backward pass runs only if the network records gradients.
        """
        scope = enter_call()
        try:
            y = self._network(self._input).shard
        finally:
            scope.leave()
        if y.requires_grad:
            torch.autograd.grad(y, list(self._network.parameters()), torch.ones_like(y))
        _streamed_memory()[:streamed].add_(1)

    def before(self, run: Callable[[], object], streamed: int = 0) -> tuple[float, Any]:
        """Run the network and pass `streamed` bytes through the caches, then call and time `run`.

        Returns the seconds and the result of `run`.
        """
        self.run(streamed)
        start = time.perf_counter()
        result = run()
        return time.perf_counter() - start, result


@cache
def _streamed_memory() -> Tensor:
    return torch.zeros(max(STREAMED), dtype=torch.uint8)


def _with_elements(shape: tuple[int, ...], grid: DryRunGrid) -> DistTensor:
    """Return a DistTensor of global `shape` with random elements on the grid of a dry run."""
    block = torch.rand(grid.tensor(shape).shard.shape).requires_grad_()
    return DistTensor(block, shape, default_cuts(len(shape), grid.topology), grid)


def _measure(
    module: nn.Module, shape: tuple[int, ...], others: _InterveningNetwork, copies: int
) -> dict[str, list[float]]:
    """Return the seconds of Python of a layer's function and of its backward pass, by name.

    Each list has one time for each number of bytes in `STREAMED`, which are passed through the
    caches before a call. The seconds of the layer's kernels are subtracted. The times are medians
    over `copies` of the module, with the network `others` run before each call. `shape` is the
    global shape of the input.
    """
    options: Any = {"rank": 0, "loss": lambda output: output.sum(), "input_gradients": True}
    recording = record_step(module, [shape], others.grid.shape, **options)
    layer = next(iter(recording.layers))
    operators: dict[str, list[LocalOperator]] = {"forward": [], "backward": []}
    names: dict[str, list[str]] = {"forward": [], "backward": []}
    for event in recording.events:
        if isinstance(event, Compute) and event.place.layer == layer:
            operators[event.place.phase].append(event.operator)
        elif isinstance(event, HostWork) and event.place.layer == layer:
            names[event.place.phase].append(event.function)
    passes = _passes(module, _with_elements(shape, others.grid), others, copies)
    found = {}
    for phase, name in names.items():
        if len(name) == 1:
            kernels = seconds_of_kernels(operators[phase], others)
            found[name[0]] = [max(seconds - kernels, 0.0) for seconds in passes[phase]]
    return found


def _passes(
    module: nn.Module, x: DistTensor, others: _InterveningNetwork, copies: int
) -> dict[str, list[float]]:
    """Return the seconds of the passes of a module, "forward" and "backward", kernels included.

    Each list has one time for each number of bytes in `STREAMED`, which are passed through the
    caches before a call. `x` is the input, on the grid of a dry run. The times are medians over
    `copies` of the module, with the network `others` run before each call.
    """
    chain = [copy.deepcopy(module) for _ in range(copies)]
    own((p for layer in chain for p in layer.parameters()), x.grid.size)
    found: dict[str, list[float]] = {"forward": [], "backward": []}
    for size in (0, *STREAMED):  # the first round warms up, and is discarded
        forward, backward, outputs = [], [], []
        for layer in chain:
            scope = enter_call()
            try:
                seconds, y = others.before(partial(layer, x), size)
            finally:
                scope.leave()
            forward.append(seconds)
            outputs.append(y.shard)
        for layer in reversed(chain):
            y = outputs.pop()
            inputs = [x.shard, *layer.parameters()]
            adjoint = partial(torch.autograd.grad, y, inputs, torch.ones_like(y), allow_unused=True)
            backward.append(others.before(adjoint, size)[0])
        for phase, timed in zip(found, (forward, backward), strict=True):
            found[phase].append(median(timed))
    return {phase: seconds[1:] for phase, seconds in found.items()}


def _of_parameter(grid: ProcessGrid, count: int) -> list[float]:
    """Return the seconds that each trained parameter adds to a step. Collective on `grid`.

    The list has one time for each entry of `STREAMED`, the bytes of other data that pass through
    the caches between layers. A time is the optimizer's update plus the additional time of the
    backward pass, which includes the reduction of the gradient on `grid`. The latter is the
    difference between two modules with `count` parameters, trained or frozen.
    """
    others = _InterveningNetwork(DryRunGrid({}, 0))
    trained, frozen = _Chain(count, others), _Chain(count, others)
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
            others.run(size)
            start = clock()
            optimizer.step()
            optimizer.zero_grad()
            updates.append((clock() - start) / count)
        gradient = median(trained.seconds) - median(frozen.seconds)
        found.append(median(updates) + max(gradient, 0.0))
    return found


class _Chain(nn.Module):
    """A module that sums `count` one-element parameters, and times its backward pass for each.

    The network `others` runs between two parameters. `seconds` collects the times.
    """

    def __init__(self, count: int, others: _InterveningNetwork) -> None:
        super().__init__()
        self.others = others
        self.summands = nn.ParameterList(torch.ones(1) for _ in range(count))
        self.size = 0
        """The bytes passed through the caches before each summand."""
        self.seconds: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of `x` and all parameters, added one after the other."""
        self.since: float | None = None
        total = torch.zeros(1)
        for p in self.summands:
            total = _Streaming.apply(total + p, self)
        return x + total


class _Streaming(Function):
    """The identity. Its backward pass records the time since the last one, and fills the caches."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chain: _Chain) -> Tensor:
        ctx.chain = chain
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        chain = ctx.chain
        if chain.since is not None:
            chain.seconds.append(time.perf_counter() - chain.since)
        chain.others.run(chain.size)
        chain.since = time.perf_counter()
        return dy, None


def seconds_of_kernels(operators: Sequence[LocalOperator], others: _InterveningNetwork) -> float:
    """Return the median seconds of `operators`, run one after the other after the network `others`.

    The time of a layer minus these seconds is the time of Python. Between two operators the caches
    keep their contents, as within the layer.
    """
    times = []
    for _ in range(10):
        calls = [call_of(operator, others.memory) for operator in operators]
        times.append(others.before(partial(_run, calls))[0])
    return median(times[2:])


@torch.no_grad()
def _run(calls: Iterable[Callable[[], object]]) -> None:
    for call in calls:
        call()
