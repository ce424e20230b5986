"""The loss of a segmentation, and the Dice coefficients of its classes, counted on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from examples.segmenting.dice import dice_loss
from examples.trainer.example import Score

from .tomography import CLASSES


@dataclass(frozen=True)
class SegmentationScore(Score):
    """The quality of segmentations.

    Attributes:
        loss: cross entropy plus Dice loss, the mean over samples.
        dice_background, dice_body, dice_organ, dice_lesion: the Dice coefficient of each class,
            over all samples.
    """

    dice_background: float
    dice_body: float
    dice_organ: float
    dice_lesion: float

    def __str__(self) -> str:
        coefficients = (f"{name} {getattr(self, f'dice_{name}'):.3f}" for name in CLASSES)
        return f"loss {self.loss:.4g}, Dice of {', '.join(coefficients)}"


def segmentation_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Return cross entropy plus the Dice loss of all classes.

    Args:
        scores: the scores of classes, before the softmax: (samples, classes, D, H, W).
        labels: (samples, D, H, W), integers.
    """
    return F.cross_entropy(scores, labels) + dice_loss(scores, labels)
