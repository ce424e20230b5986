"""Losses and Dice coefficients of segmentations, counted on all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

SMOOTHING = 1.0
"""Voxels added to both sides of a soft Dice coefficient, for classes that a batch lacks."""


def dice_loss(scores: Tensor, labels: Tensor, first: int = 0) -> Tensor:
    """Return 1 - the mean over classes of the soft Dice coefficient.

    Milletari et al., 3DV 2016, with probabilities not squared. All classes have the same weight,
    whatever their number of voxels; cross entropy alone would neglect the smallest.

    Args:
        scores: the scores of all classes, before the softmax: (samples, classes, D, H, W).
        labels: (samples, D, H, W), integers.
        first: the first class to include.
    """
    predicted = torch.softmax(scores, 1)[:, first:]
    numbers = torch.arange(first, scores.shape[1], device=scores.device).view(1, -1, 1, 1, 1)
    true = (labels.unsqueeze(1) == numbers).to(scores.dtype)
    of_a_class = (0, 2, 3, 4)
    overlap = 2 * (predicted * true).sum(of_a_class) + SMOOTHING
    both = predicted.sum(of_a_class) + true.sum(of_a_class) + SMOOTHING
    return 1 - (overlap / both).mean()


def evaluate(
    predict: Callable[[Tensor], Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
    batches: Iterable[Sequence[Any]],
    classes: int,
) -> tuple[float, list[float]]:
    """Return the mean loss of samples, and the Dice coefficient of each class over all voxels of
    all `batches`. Without gradients; collective.

    Args:
        predict: returns the scores of all classes for images.
        loss: returns the loss of scores and labels.
    """
    samples = total = 0.0
    counts = torch.zeros(classes, 3, dtype=torch.float64)
    with torch.no_grad():
        for images, labels in batches:
            scores = predict(images)
            total += loss(scores, labels).item() * len(images)
            samples += len(images)
            counts += count(scores.argmax(1), labels, classes)
    return total / samples, dice_coefficients(counts)


def dice_coefficients(counts: Tensor) -> list[float]:
    """Return 2 |P & T| / (|P| + |T|) of each class, from `count` over all samples.

    P are the voxels predicted for the class, T its true voxels. It is 1 where there are neither.
    """
    return [2 * both / (p + t) if p + t else 1.0 for both, p, t in counts.tolist()]


def count(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return for each class the number of its voxels in both, in `predicted`, and in `labels`.

    Both are (samples, D, H, W), DistTensors or plain; the result is a plain (classes, 3), the same
    on all ranks. Collective.
    """
    numbers = []
    for label in range(classes):
        p, t = predicted == label, labels == label
        numbers.append([(p & t).sum().item(), p.sum().item(), t.sum().item()])
    return torch.tensor(numbers, dtype=torch.float64)
