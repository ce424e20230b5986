"""Options for methods of training: large batches, and workers that do not run in step."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from distconv.training import (
    Constant,
    Cosine,
    CosineRestarts,
    Decay,
    GradientLag,
    Polynomial,
    Recipe,
)

from .arguments import Add, natural, positive

METHODS = ("sync", "easgd", "downpour", "hybrid")
RECIPES: dict[str, Callable[[int], Decay]] = {
    "constant": lambda epoch: Constant(),
    "cosine": lambda epoch: Cosine(),
    "polynomial": lambda epoch: Polynomial(2.0),
    "restarts": lambda epoch: CosineRestarts(10 * epoch, 2, 0.1),
}
"""The decays of the learning rate, by the number of updates in an epoch."""
DECISIVE = ("recipe", "reference_batch_size", "warmup_epochs", "lag", "wire")
"""The options here that determine the numbers of a run in step."""
DECISIVE_APART = ("method", "servers", "groups", "period")
"""Further options that do so where workers do not run in step."""


def add_method_arguments(add: Add) -> None:
    """Add the options for the method of training."""
    add(
        "--recipe",
        "scale the learning rate by the batch size, warm it up, and let it fall in this way",
        choices=RECIPES,
    )
    add(
        "--reference-batch-size",
        "the batch size for which --learning-rate was found (default: that of the run)",
        type=positive(int),
        metavar="N",
    )
    add("--warmup-epochs", "over which the rate grows to the scaled one", type=natural, default=0)
    add("--lag", "steps by which gradients are late", type=natural, default=0, metavar="N")
    add("--wire", "send gradients as halves", choices=("bfloat16", "float16"))
    add(
        "--method",
        "how replicas learn together: in step, by elastic averaging, or by a server, to which each "
        "(downpour) or each group of them (hybrid) brings gradients when it has some",
        choices=METHODS,
        default="sync",
    )
    add("--servers", "ranks that serve, for downpour and hybrid", type=positive(int), default=1)
    add(
        "--groups",
        "workers into which the replicas are put (default: each is one; for hybrid: two)",
        type=positive(int),
    )
    add("--period", "steps from one pull or push to the next", type=positive(int), default=1)


def check_method(args: argparse.Namespace) -> None:
    """Raise `ValueError` for options that contradict each other."""
    if args.recipe and RECIPES[args.recipe](1).needs_end and args.warmup_epochs >= args.epochs:
        raise ValueError(
            f"--warmup-epochs {args.warmup_epochs} leave none of --epochs {args.epochs} for "
            f"--recipe {args.recipe}; give fewer, or --recipe constant"
        )
    if args.lag and args.wire:
        raise ValueError("--lag and --wire do not go together yet; choose one")
    if args.method == "sync":
        return
    refused = {
        "--lag": args.lag,
        "--wire": args.wire,
        "--compare-serial": args.compare_serial,
    }
    for option, given in refused.items():
        if given:
            raise ValueError(f"{option} is for --method sync, this run has {args.method}")


def recipe_of(args: argparse.Namespace, batch_size: int, epoch: int) -> Recipe | None:
    """Return the recipe of a run, or None.

    Args:
        batch_size: the samples of an update.
        epoch: the updates of an epoch.
    """
    if args.recipe is None:
        return None
    decay = RECIPES[args.recipe](epoch)
    return Recipe(
        batch_size=batch_size,
        reference_batch_size=args.reference_batch_size or batch_size,
        scaling="sqrt" if args.optimizer.startswith("adam") else "linear",
        warmup_steps=args.warmup_epochs * epoch,
        decay=decay,
        total_steps=args.epochs * epoch if decay.needs_end else None,
    )


class Steps:
    """The optimizer steps of a run in step, with its learning rates and late gradients.

    Args:
        epoch: the number of steps in an epoch.
    """

    def __init__(
        self, args: argparse.Namespace, model: nn.Module, optimizer: Optimizer, epoch: int
    ) -> None:
        self._optimizer = optimizer
        recipe = recipe_of(args, args.batch_size, epoch)
        self.scheduler: LambdaLR | None = recipe.schedule(optimizer) if recipe else None
        self._late = GradientLag(model, lag=args.lag, warmup_steps=epoch) if args.lag else None

    def step(self, loss: Tensor) -> None:
        """Take a step down the gradient of a loss."""
        if self._late is not None:
            self._late.backward(loss)
        else:
            loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the late gradients; optimizer and scheduler are saved elsewhere."""
        return {} if self._late is None else self._late.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load late gradients, on the same grid."""
        if self._late is not None:
            self._late.load_state_dict(state)
