"""The first steps of a training run on all ranks and on one rank alone, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import distconv as dc

Course = tuple[list[float], list[nn.Parameter]]
"""The loss of every step, and the parameters after the last."""


@dataclass(frozen=True)
class Difference:
    """The largest relative differences between two runs.

    Attributes:
        loss: the largest difference of losses over the steps.
        parameters: the largest difference of parameters after the last step, each relative to the
            largest magnitude in it.
    """

    loss: float
    parameters: float

    def __str__(self) -> str:
        return f"{self.loss:.2g} of the loss, {self.parameters:.2g} of the parameters"


@dataclass(frozen=True)
class Comparison:
    """The difference of a distributed run from the serial one, and the effect of rounding alone.

    Attributes:
        grid: the distributed run against the serial one.
        rounding: a serial run with the samples of every mini-batch in reverse order, against the
            serial run. The order has no meaning, so this is the noise of the arithmetic, as many
            steps of a deep network amplify it.
    """

    grid: Difference
    rounding: Difference


Loss = Callable[[nn.Module, Sequence[Tensor]], Tensor]
"""A function from a model and the fields of one mini-batch to the loss."""


def compare_with_serial(
    build_model: Callable[[], nn.Module],
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    loss: Loss,
    open_data: Callable[[dc.ProcessGrid], dc.data.Dataset],
    grid: dc.ProcessGrid,
    batches: list[list[int]],
) -> Comparison:
    """Take one step for each of `batches`, on `grid` and on its rank 0 alone.

    Collective. The serial runs have models and optimizers of their own, and read whole samples
    into plain tensors; rank 0 must have the memory for it.
    """
    model = dc.parallelize(build_model(), grid)
    loader = dc.data.Loader(open_data(grid), batch_sampler=batches)
    distributed = _steps(model, build_optimizer(model), loss, loader)

    def serial(batches: list[list[int]]) -> Course:
        whole = open_data(dc.ProcessGrid(grid.ranks[:1]))
        model = build_model().to(whole.grid.device)
        loader = dc.data.Loader(whole, batch_sampler=batches)
        plain = ([field.to_local() for field in batch] for batch in loader)
        return _steps(model, build_optimizer(model), loss, plain)

    def compare() -> Comparison:
        reference = serial(batches)
        reordered = serial([batch[::-1] for batch in batches])
        return Comparison(_difference(distributed, reference), _difference(reordered, reference))

    return dc.data.on_rank_zero(grid, compare)


def _steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    batches: Iterable[Sequence[Tensor]],
) -> Course:
    """Train on every mini-batch once."""
    losses = []
    for batch in batches:
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
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
