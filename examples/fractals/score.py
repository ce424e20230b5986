"""The loss of the benchmark, and the Dice coefficient by which training ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from examples.segmenting.dice import dice_loss
from examples.trainer.example import Score


@dataclass(frozen=True)
class FractalScore(Score):
    """The quality of segmentations.

    Attributes:
        loss: weighted cross entropy plus Dice loss, the mean over samples.
        dice: the mean of the Dice coefficients of the fractals' classes, over all samples together.
        dice_worst: the lowest of these coefficients.
    """

    dice: float
    dice_worst: float

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4g}, Dice {self.dice:.4f}, of the worst class {self.dice_worst:.3f}"
        )


def class_weights(fractions: Sequence[float]) -> Tensor:
    """Return the weights of classes in the cross entropy: one over their fractions, of mean 1.

    A class without voxels weighs as much as the rarest that has some.
    """
    shares = torch.tensor(fractions, dtype=torch.float64)
    weights = 1 / shares.clamp(min=shares[shares > 0].min())
    return weights / weights.mean()


def fractal_loss(scores: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Return cross entropy, weighted by class, plus the Dice loss of the classes of fractals.

    Args:
        scores: the scores of classes, before the softmax: (samples, classes, D, H, W).
        labels: (samples, D, H, W), integers.
        weights: (classes,).
    """
    weights = weights.to(device=scores.device, dtype=scores.dtype)
    return F.cross_entropy(scores, labels, weights) + dice_loss(scores, labels, first=1)
