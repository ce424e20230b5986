"""The 3-D U-Net as published, a plain `torch.nn` module: Cicek et al., MICCAI 2016."""

from __future__ import annotations

import torch
from torch import Tensor, nn

DOWN = ((32, 64), (64, 128), (128, 256))
BOTTOM = (256, 512)
UP = ((256, 256), (128, 128), (64, 64))
"""The filters of both convolutions of each level."""


class UNet3d(nn.Module):
    """Predicts a score of each class for each voxel.

    Input (samples, channels, D, H, W), output (samples, classes, D, H, W), for sides of any size:
    an odd plane is pooled with half a window at its end, and upsampled volumes are cropped. With
    sides that are multiples of 8 this is the published network.

    Args:
        channels: the channels of the input.
        classes: the classes of the output.
        width: multiplies the filters of every convolution (rounded, at least one).
    """

    def __init__(self, channels: int = 1, classes: int = 4, width: float = 1.0) -> None:
        super().__init__()
        if not width > 0:
            raise ValueError(f"width={width} must be positive; 1.0 is the published network")

        def scaled(filters: tuple[int, int]) -> tuple[int, int]:
            first, second = (max(1, round(width * n)) for n in filters)
            return first, second

        down = [scaled(filters) for filters in DOWN]
        inputs = [channels, *(filters[1] for filters in down)]
        self.down = nn.ModuleList(_level(n, f) for n, f in zip(inputs, down, strict=False))
        self.pool = nn.MaxPool3d(2, ceil_mode=True)
        bottom = scaled(BOTTOM)
        self.bottom = _level(inputs[-1], bottom)
        self.upsample, self.up = nn.ModuleList(), nn.ModuleList()
        below = bottom[1]
        for level, skip in zip(UP, reversed(down), strict=True):
            filters = scaled(level)
            self.upsample.append(nn.ConvTranspose3d(below, below, 2, stride=2))
            self.up.append(_level(below + skip[1], filters))
            below = filters[1]
        self.head = nn.Conv3d(below, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map volumes to the scores of classes before the softmax."""
        skips = []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for upsample, level in zip(self.upsample, self.up, strict=True):
            skip = skips.pop()
            depth, height, width = skip.shape[2:]
            x = upsample(x)[:, :, :depth, :height, :width]
            x = level(torch.cat([skip, x], 1))
        scores: Tensor = self.head(x)
        return scores


def _level(channels: int, filters: tuple[int, int]) -> nn.Sequential:
    """Return two convolutions, each with batch norm and leaky ReLU."""
    layers: list[nn.Module] = []
    for count in filters:
        layers += [
            nn.Conv3d(channels, count, 3, padding=1, bias=False),
            nn.BatchNorm3d(count),
            nn.LeakyReLU(inplace=True),
        ]
        channels = count
    return nn.Sequential(*layers)
