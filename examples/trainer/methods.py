"""Options for methods of training: large batches, and workers that do not run in step."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from distconv.training import (
    Constant,
    Cosine,
    CosineRestarts,
    Decay,
    GradientLag,
    Polynomial,
    Recipe,
)

from .arguments import Add, fraction, natural, positive

METHODS = ("sync", "easgd", "downpour", "hybrid")
RECIPES: dict[str, Callable[[int], Decay]] = {
    "constant": lambda epoch: Constant(),
    "cosine": lambda epoch: Cosine(),
    "polynomial": lambda epoch: Polynomial(2.0),
    "restarts": lambda epoch: CosineRestarts(10 * epoch, 2, 0.1),
}
"""The decays of the learning rate, by the number of updates in an epoch."""
DECISIVE = ("recipe", "reference_batch_size", "warmup_epochs", "ema", "lag", "wire")
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
    add(
        "--ema",
        "validate and draw with an exponential moving average of the weights that keeps this "
        "fraction in each step, such as 0.95",
        type=fraction,
        metavar="DECAY",
    )
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
        "--ema": args.ema,
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
    """The optimizer steps of a run in step, with learning rates, late gradients, averaged weights.

    Args:
        epoch: the number of steps in an epoch.

    Attributes:
        evaluated: the model to validate: with averaged weights for `--ema`, else the trained one.
    """

    def __init__(
        self, args: argparse.Namespace, model: nn.Module, optimizer: Optimizer, epoch: int
    ) -> None:
        self._optimizer = optimizer
        recipe = recipe_of(args, args.batch_size, epoch)
        self.scheduler: LambdaLR | None = recipe.schedule(optimizer) if recipe else None
        self._late = GradientLag(model, lag=args.lag, warmup_steps=epoch) if args.lag else None
        self._model, self._average, self.evaluated = model, None, model
        if args.ema is not None:
            rule = get_ema_multi_avg_fn(args.ema)
            self._average = AveragedModel(model, multi_avg_fn=rule, use_buffers=True)
            self.evaluated = self._average.module

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
        if self._average is not None:
            self._average.update_parameters(self._model)

    def state_dict(self) -> dict[str, Any]:
        """Return late gradients and averaged weights, without optimizer and scheduler."""
        parts = {"late": self._late, "average": self._average}
        return {name: part.state_dict() for name, part in parts.items() if part is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load late gradients, on the same grid, and averaged weights."""
        if self._late is not None:
            self._late.load_state_dict(state.get("late", {}))
        if self._average is not None:
            self._average.load_state_dict(state["average"])
