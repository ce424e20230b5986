"""Published architectures as ordinary torch.nn modules, in small."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm = Callable[[int], nn.Module]


def unit(inward: int, outward: int, norm: Norm, spatial: int = 2, **options: Any) -> nn.Sequential:
    """Return convolution, normalisation and ReLU in place."""
    conv = {2: nn.Conv2d, 3: nn.Conv3d}[spatial]
    return nn.Sequential(
        conv(inward, outward, 3, padding=1, bias=False, **options), norm(outward), nn.ReLU(True)
    )


class Bottleneck(nn.Module):
    """The residual block of ResNet-50."""

    def __init__(self, inward: int, inner: int, stride: int):
        super().__init__()
        outward = 4 * inner
        self.body = nn.Sequential(
            *(nn.Conv2d(inward, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(True)),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False),
            *(nn.BatchNorm2d(inner), nn.ReLU(True)),
            *(nn.Conv2d(inner, outward, 1, bias=False), nn.BatchNorm2d(outward)),
        )
        self.shortcut = nn.Sequential(
            nn.Conv2d(inward, outward, 1, stride, bias=False), nn.BatchNorm2d(outward)
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        out += self.shortcut(x)
        return F.relu(out, inplace=True)


def resnet() -> nn.Module:
    """Return a ResNet: 7x7 stem, overlapping pooling, bottlenecks, a linear head."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(True)),
        nn.MaxPool2d(3, 2, 1),
        *(Bottleneck(8, 4, 1), Bottleneck(16, 4, 2), Bottleneck(16, 4, 2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)),
    )


class UNet(nn.Module):
    """A U-Net whose upsampled planes are padded to the skips, so that any size fits."""

    def __init__(self, spatial: int, norm: Norm, widths: Sequence[int] = (4, 6, 8)):
        super().__init__()
        up = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[spatial]
        self.pool = {2: nn.MaxPool2d, 3: nn.MaxPool3d}[spatial](2, ceil_mode=False)
        before = (2, *widths[:-1])
        self.down = nn.ModuleList(
            unit(a, b, norm, spatial) for a, b in zip(before, widths, strict=True)
        )
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(up(a, b, 2, 2) for a, b in pairs)
        self.merge = nn.ModuleList(unit(2 * b, b, norm, spatial) for _, b in pairs)
        conv = {2: nn.Conv2d, 3: nn.Conv3d}[spatial]
        self.head = conv(widths[0], 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for i, block in enumerate(self.down):
            x = block(self.pool(x) if i else x)
            skips.append(x)
        skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            skip = skips.pop()
            x = up(x)
            missing = [n - m for n, m in zip(skip.shape[2:], x.shape[2:], strict=True)]
            x = F.pad(x, [n for d in reversed(missing) for n in (d // 2, d - d // 2)])
            x = merge(torch.cat([skip, x], 1))
        return self.head(x)


class VNet(nn.Module):
    """A small V-Net: residual stages, strided convolutions down, PReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv3d(1, 4, 5, padding=2), nn.BatchNorm3d(4), nn.PReLU(4))
        self.down = nn.Sequential(nn.Conv3d(4, 8, 2, 2), nn.PReLU(8))
        self.deep = nn.Sequential(nn.Conv3d(8, 8, 5, padding=2), nn.PReLU(8))
        self.up = nn.ConvTranspose3d(8, 4, 2, 2)
        self.head = nn.Conv3d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.enter(x) + x
        b = self.down(a)
        b = b + self.deep(b)
        up = F.interpolate(self.up(b), size=a.shape[2:])
        return self.head(torch.cat([a, up], dim=1))


def cosmoflow(average: bool) -> nn.Module:
    """Return CosmoFlow in one of its published forms: overlapping average or max pooling."""
    layers: list[nn.Module] = []
    channels = 2
    for width in (4, 8):
        layers += [nn.Conv3d(channels, width, 3, padding=1)]
        layers += [] if average else [nn.BatchNorm3d(width)]
        layers += [nn.LeakyReLU(0.3), nn.AvgPool3d(3, 2, 1) if average else nn.MaxPool3d(2)]
        channels = width
    head = [nn.LazyLinear(12), nn.LeakyReLU(0.3), nn.Linear(12, 4)]
    return nn.Sequential(*layers, nn.Flatten(), *head)


class DeepLab(nn.Module):
    """A small DeepLab: dilated convolutions side by side, a pooled branch, bilinear resampling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(unit(3, 6, nn.BatchNorm2d, stride=2), unit(6, 8, nn.BatchNorm2d))
        self.rates = nn.ModuleList(
            nn.Conv2d(8, 4, 3, padding=rate, dilation=rate) for rate in (1, 2, 4)
        )
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 4, 1), nn.ReLU())
        self.head = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        pooled = F.interpolate(self.pooled(y), size=y.shape[2:], mode="nearest")
        y = self.head(torch.cat([*(conv(y) for conv in self.rates), pooled], 1))
        return F.interpolate(y, size=x.shape[-2:], mode="bilinear", align_corners=False)


class DenseNet(nn.Module):
    """A dense block: every layer sees all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(4 + 3 * i), nn.ReLU(), nn.Conv2d(4 + 3 * i, 3, 3, padding=1)
            )
            for i in range(3)
        )
        self.enter = nn.Conv2d(3, 4, 3, padding=1)
        self.leave = nn.Sequential(nn.Conv2d(13, 6, 1), nn.AvgPool2d(2))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.enter(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.head(self.leave(torch.cat(features, 1)).mean((2, 3)))


def mobilenet() -> nn.Module:
    """Return a MobileNet: depthwise separable convolutions with ReLU6."""
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU6(True)]
    for stride in (1, 2):
        layers += [nn.Conv2d(8, 8, 3, stride, 1, groups=8), nn.BatchNorm2d(8), nn.Hardswish()]
        layers += [nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(1), nn.Linear(8, 5))


class SegResNet(nn.Module):
    """A small SegResNet: group norm before convolutions, trilinear upsampling, skips that add."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv3d(1, 4, 3, padding=1)
        self.block = nn.Sequential(nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv3d(4, 4, 3, padding=1))
        self.down = nn.Conv3d(4, 8, 3, 2, 1)
        self.deep = nn.Sequential(nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv3d(8, 8, 3, padding=1))
        self.narrow = nn.Conv3d(8, 4, 1)
        self.head = nn.Conv3d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.enter(x)
        a = a + self.block(a)
        b = self.down(a)
        b = self.narrow(b + self.deep(b))
        up = F.interpolate(b, size=a.shape[2:], mode="trilinear", align_corners=True)
        return self.head(a + up)


class ConvNeXt(nn.Module):
    """A small ConvNeXt: 4x4 patch stem, 7x7 depthwise blocks, layer norm over channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 4, 4)
        self.depthwise = nn.Conv2d(6, 6, 7, padding=3, groups=6)
        self.norm = nn.LayerNorm(6)
        self.wide, self.narrow = nn.Linear(6, 24), nn.Linear(24, 6)
        self.scale = nn.Parameter(torch.full((6,), 0.5))
        self.head = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = self.narrow(F.gelu(self.wide(self.norm(y)))) * self.scale
        x = x + y.permute(0, 3, 1, 2)
        return self.head(x.mean([-2, -1]))


def group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(2, channels)


def instance_norm(spatial: int) -> Norm:
    kind = {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}[spatial]
    return lambda channels: kind(channels, affine=True)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet": (resnet, (3, 45, 37)),
    "U-Net 2-D, batch norm": (lambda: UNet(2, nn.BatchNorm2d), (2, 21, 18)),
    "U-Net 2-D, group norm": (lambda: UNet(2, group_norm), (2, 23, 17)),
    "U-Net 2-D, instance norm": (lambda: UNet(2, instance_norm(2)), (2, 19, 22)),
    "U-Net 3-D, batch norm": (lambda: UNet(3, nn.BatchNorm3d), (2, 11, 9, 10)),
    "U-Net 3-D, group norm": (lambda: UNet(3, group_norm), (2, 9, 12, 11)),
    "U-Net 3-D, instance norm": (lambda: UNet(3, instance_norm(3)), (2, 12, 11, 9)),
    "V-Net": (VNet, (1, 9, 11, 8)),
    "CosmoFlow, average": (lambda: cosmoflow(True), (2, 13, 11, 9)),
    "CosmoFlow, maximum": (lambda: cosmoflow(False), (2, 12, 13, 9)),
    "DeepLab": (DeepLab, (3, 27, 22)),
    "DenseNet": (DenseNet, (3, 15, 13)),
    "MobileNet": (mobilenet, (3, 29, 23)),
    "SegResNet": (SegResNet, (1, 9, 10, 7)),
    "ConvNeXt": (ConvNeXt, (3, 37, 30)),
}
"""How each network is made, and the shape of one sample."""


def some_of(grids: Sequence[dict[str, int]], number: int, most: int = 2) -> list[dict[str, int]]:
    """Return some of the grids for the network of this number: others for the next."""
    return [grids[(number + i) % len(grids)] for i in range(min(most, len(grids)))]
