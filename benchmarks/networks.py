"""The networks that benchmarks train; they know nothing of distconv.

The published ones are the examples', at a quarter of their width where that is said. The others are
of kinds that everybody writes, with the norms, activations and ways of upsampling in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measuring.network import Network
from examples.cosmoflow.network import FORMS, CosmoFlowNet
from examples.mesh_tangling.network import mesh_tangling_1k
from examples.unet3d.network import UNet3d

_QUARTER = 0.25


class UNet(nn.Module):
    """A U-Net of planes or volumes with two convolutions at each level, up and down.

    Parameters
    ----------
    ndim: 2 for planes, 3 for volumes.
    width: channels of the first level; each following one has twice as many.
    levels: how many there are.
    norm: makes the norm behind a convolution of this many channels.
    interpolates: whether to upsample by interpolation, not by transposed convolution.
    """

    def __init__(
        self,
        ndim: int,
        channels: int,
        classes: int,
        width: int,
        levels: int,
        norm: Callable[[int], nn.Module],
        activation: type[nn.Module] = nn.ReLU,
        interpolates: bool = False,
    ) -> None:
        super().__init__()
        conv = nn.Conv2d if ndim == 2 else nn.Conv3d
        transposed = nn.ConvTranspose2d if ndim == 2 else nn.ConvTranspose3d

        def level(inward: int, outward: int) -> nn.Sequential:
            layers: list[nn.Module] = []
            for entering in (inward, outward):
                layers += [conv(entering, outward, 3, padding=1, bias=False), norm(outward)]
                layers.append(activation())
            return nn.Sequential(*layers)

        def raised(inward: int, outward: int) -> nn.Module:
            if not interpolates:
                return transposed(inward, outward, 2, 2)
            mode = "bilinear" if ndim == 2 else "trilinear"
            return nn.Sequential(nn.Upsample(scale_factor=2, mode=mode), conv(inward, outward, 1))

        widths = [width * 2**i for i in range(levels)]
        self.down = nn.ModuleList(level(a, b) for a, b in pairwise([channels, *widths]))
        self.pool = nn.MaxPool2d(2) if ndim == 2 else nn.MaxPool3d(2)
        upwards = [(b, a) for a, b in reversed(list(pairwise(widths)))]
        self.up = nn.ModuleList(raised(below, here) for below, here in upwards)
        self.merge = nn.ModuleList(level(2 * here, here) for _, here in upwards)
        self.head = conv(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, channels, *spatial) to logits (N, classes, *spatial)."""
        skips: list[Tensor] = []
        for level in self.down:
            x = level(self.pool(x) if skips else x)
            skips.append(x)
        skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)


class Residual(nn.Module):
    """A 3x3 convolution that is added to its input, with batch norm or without, and ReLU."""

    def __init__(self, channels: int, norm: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=not norm)
        self.norm = nn.BatchNorm2d(channels) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of `x` and the layer's output."""
        return x + self.norm(self.convolution(x)).relu()


def residual(channels: int = 32, depth: int = 17, norm: bool = True) -> nn.Module:
    """Return a chain of residual layers."""
    return nn.Sequential(*(Residual(channels, norm) for _ in range(depth)))


class Bottleneck(nn.Module):
    """The block of ResNet-50 (He et al., "Deep Residual Learning", CVPR 2016): 1x1, 3x3 and 1x1
    convolutions beside a shortcut, which is a 1x1 convolution where the shape changes; the 3x3
    convolution has the stride."""

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


def classes(made: tuple[int, ...]) -> Tensor:
    """Return random labels for logits of this shape."""
    return torch.randint(made[1], (made[0], *made[2:]))


def mesh_tangling(spatial: Sequence[int]) -> nn.Module:
    """Return the 1K network at a quarter of its width, shrunk to a mesh of this size."""
    return mesh_tangling_1k(_QUARTER, max(spatial))


def cosmoflow(spatial: Sequence[int], form: str = "average", width: float = _QUARTER) -> nn.Module:
    """Return CosmoFlow, at a quarter of its width by default, for volumes of this size."""
    return CosmoFlowNet(FORMS[form], spatial, width)


_group_norm = partial(nn.GroupNorm, 8)
_unet2d = partial(UNet, 2, 3, 2, 16, 3, nn.BatchNorm2d)
_grouped2d = partial(UNet, 2, 3, 2, 16, 3, _group_norm, nn.SiLU, True)


def _whatever_the_size(make: Callable[[], nn.Module]) -> Callable[[Sequence[int]], nn.Module]:
    return lambda spatial: make()


MESH = Network(
    *("mesh-tangling 1K, 512^2", mesh_tangling, (1, 18, 512, 512)),
    over_plain=1.06,
    remarks=("quarter width",),
)
COSMOFLOW = Network(
    *("CosmoFlow, 64^3", cosmoflow, (1, 4, 64, 64, 64)),
    over_plain=1.06,
    remarks=("quarter width",),
)
UNET3D = Network(
    "3-D U-Net, 48^3",
    _whatever_the_size(partial(UNet3d, 1, 3, _QUARTER)),
    (1, 1, 48, 48, 48),
    *(classes, F.cross_entropy),
    over_plain=1.06,
    remarks=("quarter width",),
)


def _plane(
    name: str, make: Callable[[], nn.Module], channels: int, extent: int, most: float
) -> Network:
    shape = (1, channels, extent, extent)
    return Network(f"{name}, {extent}^2", _whatever_the_size(make), shape, over_plain=most)


NETWORKS = (
    _plane("2-D U-Net", _unet2d, 3, 256, 1.15),
    _plane("2-D U-Net", _unet2d, 3, 512, 1.06),
    _plane("2-D U-Net, group norm, SiLU, bilinear", _grouped2d, 3, 256, 1.15),
    _plane("residual, 32 channels", residual, 32, 128, 1.15),
    _plane("residual, 32 channels", residual, 32, 512, 1.06),
    _plane("residual, 128 channels", partial(residual, 128, 4, False), 128, 32, 1.35),
    MESH,
    COSMOFLOW,
    UNET3D,
    *(
        Network(
            f"3-D U-Net, group norm, {width} channels, {2**scale}^3",
            _whatever_the_size(partial(UNet, 3, 3, 6, width, scale - 2, _group_norm)),
            (1, 3, 2**scale, 2**scale, 2**scale),
            *(classes, F.cross_entropy),
            over_plain=1.06,
        )
        for scale, width in ((5, 64), (6, 32))
    ),
)
"""The networks whose steps are measured, with the longest that a step should take over the best
plain torch on the block."""
