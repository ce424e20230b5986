"""The loss of a segmentation, and how well it covers each class, counted on all ranks together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.trainer.example import Score

from .tomography import CLASSES

SMOOTHING = 1.0
"""Voxels added to both sides of a soft Dice coefficient, for classes that a mini-batch lacks."""


@dataclass(frozen=True)
class SegmentationScore(Score):
    """The quality of segmentations.

    Attributes:
        loss: cross entropy plus Dice loss, the mean over samples.
        dice_background, dice_body, dice_organ, dice_lesion: 2 |P & T| / (|P| + |T|) of the voxels P
            predicted for a class and those T that have it, over all samples; 1 where neither has
            any.
    """

    dice_background: float
    dice_body: float
    dice_organ: float
    dice_lesion: float

    def __str__(self) -> str:
        coefficients = (f"{name} {getattr(self, f'dice_{name}'):.3f}" for name in CLASSES)
        return f"loss {self.loss:.4g}, Dice of {', '.join(coefficients)}"


def segmentation_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Return cross entropy plus Dice loss: 1 - the mean over classes of the soft Dice coefficient.

    Milletari et al., 3DV 2016, with probabilities not squared. The classes weigh the same, however
    few voxels they have; cross entropy alone would pass over the smallest.

    Args:
        scores: of classes, before the softmax: (samples, classes, D, H, W).
        labels: (samples, D, H, W), whole numbers.
    """
    probabilities = torch.softmax(scores, 1)
    coefficients = []
    for label in range(len(CLASSES)):
        predicted, true = probabilities[:, label], (labels == label).to(scores.dtype)
        overlap = 2 * (predicted * true).sum() + SMOOTHING
        coefficients.append(overlap / (predicted.sum() + true.sum() + SMOOTHING))
    dice = torch.stack(coefficients).mean()
    return F.cross_entropy(scores, labels) + 1 - dice


def dice_coefficients(counts: Tensor) -> list[float]:
    """Return the Dice coefficient of each class from `count` of all samples."""
    return [2 * both / (p + t) if p + t else 1.0 for both, p, t in counts.tolist()]


def count(predicted: Tensor, labels: Tensor) -> Tensor:
    """Return for each class the voxels that have it in both, in `predicted`, and in `labels`.

    Both are (samples, D, H, W), DistTensors or plain; the result is a plain (classes, 3), the same
    on all ranks. Collective.
    """
    numbers = []
    for label in range(len(CLASSES)):
        p, t = predicted == label, labels == label
        numbers.append([(p & t).sum().item(), p.sum().item(), t.sum().item()])
    return torch.tensor(numbers, dtype=torch.float64)


def evaluate(model: nn.Module, batches: Iterable[Sequence[Any]]) -> SegmentationScore:
    """Score `model` on all voxels of all `batches`, in evaluation mode. Collective."""
    model.eval()
    samples = loss = 0.0
    counts = torch.zeros(len(CLASSES), 3, dtype=torch.float64)
    with torch.no_grad():
        for images, labels in batches:
            scores = model(images)
            loss += segmentation_loss(scores, labels).item() * len(images)
            samples += len(images)
            counts += count(scores.argmax(1), labels)
    return SegmentationScore(loss / samples, *dice_coefficients(counts))
