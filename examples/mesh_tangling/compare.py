"""The first steps of a training run on all ranks and on one rank alone, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

import distconv as dc

from .data import MeshTanglingData

Course = tuple[list[float], list[nn.Parameter]]
"""The loss of every step, and the parameters after the last."""


@dataclass(frozen=True)
class Difference:
    """The largest relative differences between two runs.

    Attributes:
        loss: over the steps.
        parameters: after the last step, over the parameters, each relative to the largest
            magnitude in it.
    """

    loss: float
    parameters: float

    def __str__(self) -> str:
        return f"{self.loss:.2g} of the loss, {self.parameters:.2g} of the parameters"


@dataclass(frozen=True)
class Comparison:
    """How far a distributed run is from the serial one, and what rounding alone can do.

    Attributes:
        grid: distributed against serial.
        rounding: serial, with the samples of every mini-batch in reverse order, against serial.
            The order has no meaning, so this is the noise of the arithmetic, as many steps of a
            deep network amplify it.
    """

    grid: Difference
    rounding: Difference


def compare_with_serial(
    build_model: Callable[[], nn.Module],
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    data: MeshTanglingData,
    batches: list[list[int]],
) -> Comparison:
    """Take one step for each of `batches`, on the grid of `data` and on its rank 0 alone.

    Collective. The serial runs have models and optimizers of their own, and read whole samples
    into plain tensors; rank 0 must have the memory for it.
    """
    model = dc.parallelize(build_model(), data.grid)
    distributed = _steps(model, build_optimizer(model), data.batches(batches))

    def serial(batches: list[list[int]]) -> Course:
        whole = MeshTanglingData(data.path, dc.ProcessGrid(data.grid.ranks[:1]), data.dtype)
        model = build_model().to(whole.grid.device)
        plain = ((x.to_local(), y.to_local()) for x, y in whole.batches(batches))
        return _steps(model, build_optimizer(model), plain)

    def compare() -> Comparison:
        reference = serial(batches)
        reordered = serial([batch[::-1] for batch in batches])
        return Comparison(_difference(distributed, reference), _difference(reordered, reference))

    return dc.data.on_rank_zero(data.grid, compare)


def _steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> Course:
    """Train on every mini-batch once."""
    losses = []
    for x, y in batches:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, list(model.parameters())


def _difference(course: Course, reference: Course) -> Difference:
    (losses, parameters), (losses_there, parameters_there) = course, reference
    return Difference(
        loss=max(abs(a - b) / abs(b) for a, b in zip(losses, losses_there, strict=True)),
        parameters=max(
            ((a - b).abs().max() / b.abs().max()).item()
            for a, b in zip(parameters, parameters_there, strict=True)
        ),
    )
