"""The quality of predicted tangled zones, counted on all ranks together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from examples.trainer.example import Score


@dataclass(frozen=True)
class MeshScore(Score):
    """The quality of the predictions for a set of samples.

    Attributes:
        loss: mean squared error of the probabilities, per zone.
        iou: intersection over union of the zones predicted to tangle (probability above a half) and
            those that do; 1 where there are neither.
        trivial_iou: the same for the better of two predictors that ignore the state, with all zones
            tangled or none.
    """

    iou: float
    trivial_iou: float

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4g}, intersection over union {self.iou:.3f} "
            f"(best trivial predictor {self.trivial_iou:.3f})"
        )


def evaluate(model: nn.Module, batches: Iterable[Sequence[Any]]) -> MeshScore:
    """Score `model` on all zones of all `batches`, in evaluation mode. Collective."""
    model.eval()
    zones = squared_error = intersection = union = tangled = 0.0
    with torch.no_grad():
        for states, targets in batches:
            probabilities = model(states)
            called, true = probabilities > 0.5, targets > 0.5
            zones += targets.numel()
            squared_error += ((probabilities - targets) ** 2).sum().item()
            intersection += (called & true).sum().item()
            union += (called | true).sum().item()
            tangled += true.sum().item()
    return MeshScore(
        loss=squared_error / zones,
        iou=intersection / union if union else 1.0,
        trivial_iou=tangled / zones if tangled else 1.0,
    )
