"""The settings and history in a checkpoint of an example, and its size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from distconv.data import Checkpoint

from .methods import DECISIVE as DECISIVE_OF_METHOD

DECISIVE = (
    "batch_size",
    "optimizer",
    "learning_rate",
    "seed",
    "precision",
    *DECISIVE_OF_METHOD,
)
"""The shared arguments that determine the numbers of a run, beside those of the example. A resumed
run must have the same ones."""

_OVERHEAD = 2**20
"""An upper bound for the bytes of names, settings and history."""


def checkpoint_size(models: Iterable[nn.Module], optimizer: torch.optim.Optimizer) -> int:
    """Return an upper bound for the bytes of a checkpoint of the trained and the averaged model,
    before the optimizer has a state.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # torch's optimizers keep two tensors of its size for each parameter, or fewer.
    states = (tensor for model in models for tensor in model.state_dict().values())
    tensors = [*states, *2 * parameters]
    return sum(t.nbytes for t in tensors) + _OVERHEAD


def check_checkpoint(found: Checkpoint, settings: dict[str, Any], scores: Sequence[str]) -> None:
    """Raise `ValueError` for a checkpoint of a run with other settings, or of another program.

    Args:
        settings: the arguments that determine the numbers of this run, by name.
        scores: the names of the numbers in the history of every epoch, beside step_losses.
    """
    saved, history = found.extra.get("settings"), found.extra.get("history")
    if not isinstance(saved, dict) or not isinstance(history, list):
        raise ValueError(
            f"{found.path} is not a checkpoint of this program: it has no settings and history"
        )
    for name, value in settings.items():
        if saved.get(name) != value:
            option = name.replace("_", "-")
            raise ValueError(
                f"{found.path} was written with --{option} {saved.get(name)}, this run has "
                f"--{option} {value}; continue with the former, or start anew without --resume"
            )
    for place, record in enumerate(history):
        try:
            numbers = [*record["step_losses"], *(record[name] for name in scores)]
            whole = bool(record["step_losses"]) and all(map(math.isfinite, numbers))
        except (KeyError, TypeError):
            whole = False
        if not whole:
            raise ValueError(
                f"{found.path} is not a checkpoint of this program: epoch {place + 1} of its "
                f"history should have a list of step_losses and the numbers {', '.join(scores)}"
            )


def check_finite_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise `ValueError` for a state that is not finite, from which no run could continue."""
    names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()} | {
        f"optimizer.{names[parameter]}.{name}": value
        for parameter, kept in optimizer.state.items()
        for name, value in kept.items()
        if isinstance(value, torch.Tensor)
    }
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ValueError(
                f"{name} holds values that are not finite; start anew from finite data, with a "
                "smaller --learning-rate or --precision float64"
            )
