"""The losses in the course of a training with a server, and the validations that may end it."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distconv.data.durable import write_atomically
from distconv.training.checks import check_count, checked_number


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss in the course of a training with a server, the result of a validation.

    Attributes
    ----------
    update: the number of updates that the server had made.
    samples: the number of samples behind these updates.
    seconds: the time in seconds that the server had served, including earlier runs.
    loss: the value.
    """

    update: int
    samples: int
    seconds: float
    loss: float


@dataclass(frozen=True, slots=True)
class TrainingLoss(Loss):
    """The mean loss of a client's mini-batches behind an update, as the client reported it.

    Attributes
    ----------
    client: the number of the client.
    """

    client: int


@dataclass
class History:
    """The losses of a training with a server, including runs before it was resumed.

    Attributes
    ----------
    training: the losses that clients reported.
    validation: the results of validations by this server.
    """

    training: list[TrainingLoss] = field(default_factory=list)
    validation: list[Loss] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._begun = time.monotonic()

    @property
    def seconds(self) -> float:
        """Return the seconds that the server has served, including runs before it was resumed."""
        return time.monotonic() - self._begun

    def state_dict(self) -> dict[str, Any]:
        """Return the losses as columns of numbers, and the time served."""
        return {
            "seconds": self.seconds,
            "training": _columns(TrainingLoss, self.training),
            "validation": _columns(Loss, self.validation),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the losses and the time by values that `state_dict` returned."""
        self._begun = time.monotonic() - state["seconds"]
        self.training = [TrainingLoss(*row) for row in _rows(state["training"])]
        self.validation = [Loss(*row) for row in _rows(state["validation"])]

    def write(self, path: Path, stopped: str | None) -> None:
        """Write the losses as JSON to a file, which is replaced atomically.

        `stopped` is the reason for which validation has ended the training, or None. A loss that is
        not finite becomes null, as JSON has no such numbers. Raises OSError if the file cannot be
        written.
        """
        state = self.state_dict() | {"stopped": stopped}
        for part in ("training", "validation"):
            state[part]["loss"] = [x if math.isfinite(x) else None for x in state[part]["loss"]]
        text = json.dumps(state, allow_nan=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(text.encode()))


class Validation:
    """The validations of a model whose parameters and buffers a server holds.

    Parameters
    ----------
    function: returns the validation loss of a model.
    every: the number of updates between validations.
    patience, target: see `serve`.
    model: the model; it is copied.
    tensors: the server's parameters and buffers, in the order of the model.
    history: the history to which each result is added.
    """

    def __init__(
        self,
        function: Callable[[nn.Module], Any],
        every: int,
        patience: int | None,
        target: float | None,
        model: nn.Module,
        tensors: Sequence[Tensor],
        history: History,
    ):
        self._function, self._every = function, every
        self._patience, self._target = patience, target
        self._model = copy.deepcopy(model).cpu()
        self._tensors, self._history = tensors, history

    def is_due(self, updates: int) -> bool:
        """Return whether `updates` has passed a multiple of `every` since the last validation."""
        return updates // self._every > self._last // self._every

    def run(self, updates: int, samples: int) -> None:
        """Validate and record the result, unless the parameters have been validated already.

        Raises ValueError if the function does not return a number.
        """
        if updates == self._last:
            return
        with torch.no_grad():
            own = (*self._model.parameters(), *self._model.buffers())
            for tensor, value in zip(own, self._tensors, strict=True):
                tensor.copy_(value)
            loss = self._function(self._model.eval())
        number = checked_number("serve", "the result of validate", loss)
        losses = self._history.validation
        losses.append(Loss(updates, samples, self._history.seconds, number))

    def reason_to_stop(self) -> str | None:
        """Return the reason for which the results so far end the training; None to continue.

        A loss that is NaN is no improvement.
        """
        losses = [validation.loss for validation in self._history.validation]
        if not losses:
            return None
        last = f"the validation loss after {self._last} updates is {losses[-1]:g}"
        if self._target is not None and losses[-1] <= self._target:
            return f"{last}, which reaches target={self._target:g}"
        best = min(range(len(losses)), key=lambda i: (math.isnan(losses[i]), losses[i]))
        if self._patience is not None and len(losses) - 1 - best >= self._patience:
            return (
                f"{last}, and has not improved on {losses[best]:g} in patience={self._patience} "
                "validations"
            )
        return None

    @property
    def _last(self) -> int:
        """Return the number of updates made before the last validation, 0 without a validation."""
        return self._history.validation[-1].update if self._history.validation else 0


def check_validation(validate: object, every: object, patience: object, target: object) -> None:
    """Raise ValueError unless the arguments of `serve` for validation are valid together."""
    if validate is None:
        others = {"every": every, "patience": patience, "target": target}
        for name, value in others.items():
            if value is not None:
                raise ValueError(
                    f"serve: {name}={value!r} needs a validation loss; pass validate=, a function "
                    "of the model that returns it"
                )
        return
    if not callable(validate):
        raise ValueError(
            f"serve: validate={validate!r} is not a function; pass a function of the model that "
            "returns its validation loss"
        )
    check_count("serve", "every", every, 1)
    if patience is not None:
        check_count("serve", "patience", patience, 1)
    if target is not None and math.isnan(checked_number("serve", "target", target)):
        raise ValueError("serve: target is NaN, which no loss reaches; pass a number")


def _columns(kind: type[Loss], losses: Sequence[Loss]) -> dict[str, list[Any]]:
    return {f.name: [getattr(loss, f.name) for loss in losses] for f in fields(kind)}


def _rows(columns: Mapping[str, Sequence[Any]]) -> list[tuple[Any, ...]]:
    return list(zip(*columns.values(), strict=True))
