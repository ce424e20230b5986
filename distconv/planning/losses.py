"""Losses and optimizers of a training step that is recorded, where the program names none."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.planning.recorded_step import Loss, OptimizerFactory
from distconv.tensor.nested import tensors_in


def _first(output: Any) -> Any:
    return tensors_in(output)[0]


def mean_square(output: Any) -> Tensor:
    """Return the mean squared error between what a module returns and zeros laid out like it."""
    y = _first(output)
    return F.mse_loss(y, torch.zeros_like(y))


def cross_entropy(output: Any) -> Tensor:
    """Return the cross entropy of logits (samples, classes, ...) and labels of the first class."""
    y = _first(output)
    return F.cross_entropy(y, torch.zeros_like(y.detach()[:, 0], dtype=torch.int64))


LOSSES: dict[str, Loss] = {"mse": mean_square, "cross-entropy": cross_entropy}

_SGD: Any = torch.optim.SGD

sgd: OptimizerFactory = partial(_SGD, lr=1e-3)

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd": sgd,
    "momentum": partial(_SGD, lr=1e-3, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
