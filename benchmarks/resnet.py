"""ResNet-50 as a plain torch module (He et al., "Deep Residual Learning", CVPR 2016)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut, which is a 1x1 convolution where the shape
    changes; the 3x3 convolution has the stride."""

    def __init__(self, inward: int, inner: int, stride: int):
        super().__init__()
        outward = 4 * inner
        self.reduce, self.norm1 = nn.Conv2d(inward, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.expand, self.norm3 = nn.Conv2d(inner, outward, 1, bias=False), nn.BatchNorm2d(outward)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inward != outward:
            conv = nn.Conv2d(inward, outward, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(outward))

    def forward(self, x: Tensor) -> Tensor:
        """Map planes of `inward` channels to planes of 4 * `inner`."""
        y = F.relu(self.norm1(self.reduce(x)))
        y = F.relu(self.norm2(self.conv(y)))
        return F.relu(self.norm3(self.expand(y)) + self.shortcut(x))


def resnet50(classes: int = 1000, divisor: int = 1) -> nn.Sequential:
    """Return ResNet-50, whose channels are divided by `divisor`."""
    channels = 64 // divisor
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 7, 2, 3, bias=False)]
    layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    for stage, depth in enumerate((3, 4, 6, 3)):
        inner = 64 * 2**stage // divisor
        for i in range(depth):
            layers.append(Bottleneck(channels, inner, 2 if stage and not i else 1))
            channels = 4 * inner
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers)
