"""Losses and optimizers of a training step that is recorded, where the program names none."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.geometry.layout import Layout
from distconv.planning.recording import Loss, OptimizerFactory
from distconv.tensor.nested import tensors_in


def _first(output: Any) -> Any:
    return tensors_in(output)[0]


def mean_square(output: Any) -> Tensor:
    """Return the mean squared error between what a module returns and a target laid out like it."""
    y = _first(output)
    return F.mse_loss(y, y.grid.tensor(tuple(y.shape), y.layout, y.dtype))


def cross_entropy(output: Any) -> Tensor:
    """Return the cross entropy of logits (samples, classes, ...) and labels without classes."""
    y = _first(output)
    cuts = y.cuts[0], *y.cuts[2:]
    labels = y.grid.tensor((y.shape[0], *y.shape[2:]), Layout.of(cuts), torch.int64)
    return F.cross_entropy(y, labels)


LOSSES: dict[str, Loss] = {"mse": mean_square, "cross-entropy": cross_entropy}

_SGD: Any = torch.optim.SGD

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd": partial(_SGD, lr=1e-3),
    "momentum": partial(_SGD, lr=1e-3, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
