"""The first steps of a training run on all ranks and on one rank alone, side by side."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import count, islice
from typing import Any

from torch import Tensor, nn

import distconv as dc
from distconv.data import Loader, Sampler, on_rank_zero

from .building import build_model, build_optimizer
from .example import Example

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


def compare_serial(
    example: Example[Any, Any], args: argparse.Namespace, grid: dc.ProcessGrid
) -> dict[str, Any]:
    """Take the first `args.compare_serial` steps of a run on `grid` and on its rank 0 alone, and
    print and return the differences. Collective.

    `rounding` compares two serial runs, one with the samples of every mini-batch in reverse order.
    The order has no meaning, so this is the noise of the arithmetic, as many steps of a deep
    network amplify it. Rank 0 must have the memory for whole samples.
    """
    data = example.open(args, grid)[0]
    sampler = Sampler(data.samples, args.batch_size, shuffle=True, drop_last=True, seed=args.seed)
    every_batch = (batch for epoch in count() for batch in sampler.batches(epoch))
    batches = list(islice(every_batch, args.compare_serial))
    model = dc.parallelize(build_model(example, args), grid)
    distributed = _steps(example, args, model, Loader(data, batch_sampler=batches))

    def serial(batches: list[list[int]]) -> Course:
        whole = example.open(args, dc.ProcessGrid(grid.ranks[:1]))[0]
        loader = Loader(whole, batch_sampler=batches)
        plain = ([field.to_local() for field in batch] for batch in loader)
        return _steps(example, args, build_model(example, args).to(whole.grid.device), plain)

    def compare() -> dict[str, Any]:
        reference = serial(batches)
        of_grid = _difference(distributed, reference)
        rounding = _difference(serial([batch[::-1] for batch in batches]), reference)
        print(
            f"largest relative difference over the first {args.compare_serial} steps:\n"
            f"  {grid} and one rank: {of_grid}\n"
            f"  one rank, mini-batches as they are and reversed: {rounding}",
            flush=True,
        )
        return {"grid": asdict(of_grid), "rounding": asdict(rounding)}

    return on_rank_zero(grid, compare)


def _steps(
    example: Example[Any, Any],
    args: argparse.Namespace,
    model: nn.Module,
    batches: Iterable[Sequence[Tensor]],
) -> Course:
    """Take one step of a new optimizer for each mini-batch."""
    optimizer = build_optimizer(args, model)
    losses = []
    for batch in batches:
        loss = example.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
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
