"""Losses of predicted tangled zones, and their quality counted on all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.trainer.example import Score


def overlap_loss(probabilities: Tensor, targets: Tensor) -> Tensor:
    """Return binary cross entropy plus 1 - the intersection over union of a mini-batch.

    Few zones tangle: the cross entropy alone favours too few. Intersection and union are sums of
    probabilities over all zones of the mini-batch.
    """
    both = (probabilities * targets).sum()
    either = probabilities.sum() + targets.sum() - both
    return F.binary_cross_entropy(probabilities, targets) + 1 - both / either


LOSSES: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "mse": ("mean squared error", F.mse_loss),
    "overlap": ("cross entropy + 1 - overlap", overlap_loss),
}
"""The losses of (probabilities, targets), (N, 1, S, S) each, with their titles in pictures."""


@dataclass(frozen=True)
class MeshScore(Score):
    """The quality of the predictions for a set of samples.

    Attributes:
        loss: mean over the samples of the loss of their mini-batches.
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


def evaluate(
    model: nn.Module,
    batches: Iterable[Sequence[Any]],
    loss: Callable[[Tensor, Tensor], Tensor] = F.mse_loss,
) -> MeshScore:
    """Score `model` on all zones of all `batches`, in evaluation mode. Collective."""
    model.eval()
    zones = total = intersection = union = tangled = 0.0
    with torch.no_grad():
        for states, targets in batches:
            probabilities = model(states)
            called, true = probabilities > 0.5, targets > 0.5
            zones += targets.numel()
            total += loss(probabilities, targets).item() * targets.numel()
            intersection += (called & true).sum().item()
            union += (called | true).sum().item()
            tangled += true.sum().item()
    return MeshScore(
        loss=total / zones,
        iou=intersection / union if union else 1.0,
        trivial_iou=tangled / zones if tangled else 1.0,
    )
