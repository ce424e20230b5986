"""The options of a run, and what is made of them: the grid, the network, the optimizer."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import distconv as dc
from distconv.data import DataError
from distconv.training import LARS
from distconv.transport.interface import ObjectCommunicator

from .arguments import Add, add_grid, natural, positive
from .example import PRECISIONS, Example
from .methods import add_method_arguments


def lars(parameters: Iterable[Any], lr: float) -> Optimizer:
    """Return SGD with momentum, with steps in proportion to the norms of layers' weights."""
    return LARS(torch.optim.SGD(parameters, lr=lr, momentum=0.9))


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "lars": lars,
}


class Diverged(ArithmeticError):
    """Training has produced numbers that are not finite. Raised on every rank."""


def add_arguments(add: Add, example: Example[Any, Any]) -> None:
    """Add the options of a training run: those of the example, of the method, and the shared."""
    add("--data", "samples to train on", type=Path, required=True)
    add("--validation", "samples to validate on", type=Path, required=True)
    add("--output", "folder for checkpoint, pictures and metrics", type=Path, required=True)
    add_grid(add, example.axes, "sample=-1")
    example.add_arguments(add)
    add_method_arguments(add)
    add("--epochs", "how often to go through the data", type=positive(int), default=18)
    add("--batch-size", "samples of a mini-batch, over all ranks", type=positive(int), default=64)
    add("--optimizer", "how to step", choices=OPTIMIZERS, default="adam")
    add("--learning-rate", "how far to step", type=positive(float), default=1e-3)
    add("--seed", "of the initial weights and the shuffling", type=natural, default=0)
    add("--precision", "of data, weights and arithmetic", choices=PRECISIONS, default="float32")
    add("--resume", "continue from the last checkpoint in this folder", type=Path, metavar="FOLDER")
    add(
        "--compare-serial",
        "first take N steps on the grid and on one rank alone, and print how far they differ",
        type=positive(int),
        metavar="N",
    )
    add(
        "--tensorboard",
        "also log losses and scores for TensorBoard, in the folder tensorboard of the output",
        action="store_true",
    )


def make_grid(
    args: argparse.Namespace, comm: ObjectCommunicator, device: str | None = None
) -> dc.ProcessGrid:
    """Return the grid of the command line. Collective."""
    try:
        return dc.ProcessGrid(comm, device=device, **args.grid)
    except ValueError as error:
        raise DataError(str(error)) from error


def build_model(example: Example[Any, Any], args: argparse.Namespace) -> nn.Module:
    """Return the untrained model, the same on every rank and every grid."""
    torch.manual_seed(args.seed)
    return example.build_model(args).to(PRECISIONS[args.precision])


def build_optimizer(args: argparse.Namespace, model: nn.Module) -> Optimizer:
    """Return torch's own optimizer: after `backward()` every rank has the serial gradients."""
    return OPTIMIZERS[args.optimizer](model.parameters(), lr=args.learning_rate)


def check_finite(
    args: argparse.Namespace, name: str, value: float, epochs_done: int, steps: int
) -> None:
    """Raise `Diverged` on every rank unless `value`, the same on all, is finite."""
    if math.isfinite(value):
        return
    kept = (
        f"{args.output} holds the state after epoch {epochs_done}"
        if epochs_done
        else "there is no checkpoint yet"
    )
    raise Diverged(
        f"the {name} is {value} in epoch {epochs_done + 1} after step {steps}; {kept}. "
        "Start anew with a smaller --learning-rate or with --precision float64, or look for "
        f"values that are not finite in {args.data} and {args.validation}"
    )
