"""The interface of a peer's script, and the gradients with which all peers are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from benchmarks.measuring.network import Network, sample
from benchmarks.measuring.own_step import with_fixed_statistics
from distconv.grid.process_grid import ProcessGrid
from distconv.model.parallelize import parallelize
from distconv.tensor.dist_tensor import distribute_tensor


class Task(NamedTuple):
    """A training step on one sample, as serial torch has it; the same on all ranks."""

    module: nn.Module
    x: Tensor
    y: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]

    @classmethod
    def of(cls, network: Network, dtype: torch.dtype) -> Task:
        """Return the task of a network that learns random numbers, with numbers of this type."""
        torch.manual_seed(0)
        module = with_fixed_statistics(network)
        x, y = sample(network, network.shape)
        return cls(module.to(dtype), x.to(dtype), y.to(dtype), network.loss)

    def copied(self) -> nn.Module:
        """Return a copy of the network."""
        return copy.deepcopy(self.module)


class Step(NamedTuple):
    """A training step of one system: forward, loss, backward and the sum of gradients."""

    run: Callable[[], object]
    gradients: Callable[[], Sequence[Tensor | None]]
    """Returns the whole gradients of the last run, in the order of the network's parameters."""
    ranks: int | None = None
    """How many ranks run it, from rank 0 on, where that is not all."""


class Peer(Protocol):
    """A module with a peer's script; its import fails where the peer is not installed."""

    NAME: str
    """The name of the peer, with its version."""

    def step(self, task: Task, ranks: int) -> Step:
        """Return the step of a task on all ranks, which call it together."""


def torch_step(
    module: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor]
) -> Step:
    """Return the step of a module of torch that adds up its gradients by itself."""

    def run() -> None:
        module.zero_grad()
        loss(module(x), y).backward()

    return Step(run, lambda: [p.grad for p in module.parameters()])


def with_whole_gradients(step: Step) -> Step:
    """Return the step with its DTensors of gradients gathered; all ranks ask for them."""

    def gradients() -> list[Tensor | None]:
        found: list[Any] = list(step.gradients())
        return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in found]

    return step._replace(gradients=gradients)


def serial(task: Task) -> Step:
    """Return the step of serial torch."""
    return torch_step(task.copied(), task.x, task.y, task.loss)


def own(task: Task, grid: ProcessGrid) -> Step:
    """Return the step of distconv on a grid; all ranks call it."""
    x, y = (distribute_tensor(t, grid) for t in (task.x, task.y))
    return torch_step(parallelize(task.copied(), grid), x, y, task.loss)


def largest_difference(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    """Return the largest difference of gradients, over the largest element of each expected one."""
    worst = 0.0
    for g, e in zip(found, expected, strict=True):
        assert e is not None
        if g is None:
            return float("inf")
        difference = (g.double() - e.double()).abs().max() / e.double().abs().max()
        worst = max(worst, difference.item())
    return worst
