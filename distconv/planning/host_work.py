"""The seconds of Python beside local operators: of each function on distributed tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distconv.geometry.layout import default_cuts
from distconv.planning.dry_run import DryRunGrid
from distconv.planning.local_operators import LocalOperator
from distconv.planning.losses import OPTIMIZERS
from distconv.planning.operator_worker import runner
from distconv.planning.recorded_step import record_step
from distconv.planning.recording import Compute, HostWork
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.module_call import enter_call, leave_call
from distconv.tensor.ownership import own

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

GRIDS: tuple[Mapping[str, int], ...] = ({}, {"height": 2})


def measure_host_work(rounds: int = 30) -> dict[str, float]:
    """Return the seconds of Python by function, as `Machine.host` has them; no communication.

    Of so many `rounds` the median counts.
    """
    host: dict[str, float] = {}
    for grid in GRIDS:
        for function in _FUNCTIONS:
            for name, seconds in _measure(function, grid, rounds):
                host.setdefault(name, seconds)
    for kind in ("", " across ranks"):
        for end in ("", " backward"):
            found = [
                s
                for name, s in host.items()
                if name.endswith(f"{kind}{end}")
                and (kind or " across ranks" not in name)
                and (end or not name.endswith(" backward"))
            ]
            host[f"*{kind}{end}"] = median(found)
    host["parameter"] = host["parameter across ranks"] = 2e-5
    return host


def _measure(
    function: _Function, extents: Mapping[str, int], rounds: int
) -> Iterator[tuple[str, float]]:
    """Yield the names under which a recording has a function and its adjoint, with the seconds."""
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
    forward, backward = _passes(module, function.shape, extents, rounds)
    for phase, run in (("forward", forward), ("backward", backward)):
        if len(names[phase]) != 1:
            continue
        whole = median(run())
        kernels = sum(_alone(operator, rounds) for operator in operators[phase])
        yield names[phase][0], max(whole - kernels, 0.0)


def _sum(output: Tensor) -> Tensor:
    return output.sum()


def _passes(
    module: nn.Module, shape: tuple[int, ...], extents: Mapping[str, int], rounds: int
) -> tuple[Callable[[], Sequence[float]], Callable[[], Sequence[float]]]:
    """Return functions that time the passes of a module on a rank whose messages nobody gets."""
    grid = DryRunGrid(extents, 0)
    own(module.parameters(), grid.size)
    cuts = default_cuts(len(shape), grid.topology)
    block = torch.rand(grid.tensor(shape).shard.shape).requires_grad_()
    x = DistTensor(block, shape, cuts, grid)
    inputs = [block, *module.parameters()]
    clock = time.perf_counter

    def timed() -> tuple[float, float]:
        scope = enter_call()
        try:
            start = clock()
            y = module(x)
            made = clock()
        finally:
            leave_call(scope)
        assert isinstance(y, DistTensor)
        dy = torch.ones_like(y.shard)
        begun = clock()
        torch.autograd.grad(y.shard, inputs, dy, allow_unused=True)
        return made - start, clock() - begun

    for _ in range(5):
        timed()
    times = [timed() for _ in range(rounds)]
    return (lambda: [f for f, _ in times]), (lambda: [b for _, b in times])


def _alone(operator: LocalOperator, rounds: int) -> float:
    """Return the seconds of a tiny operator by itself."""
    run = runner(operator)
    clock = time.perf_counter
    with torch.no_grad():
        run()
        times = []
        for _ in range(rounds):
            start = clock()
            run()
            times.append(clock() - start)
    return median(times)
