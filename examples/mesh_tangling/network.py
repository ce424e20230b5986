"""The mesh-tangling networks: plain `torch.nn` modules without any distconv code.

From the 18 channels of a simulation's state on an S x S mesh they predict, zone by zone, the
probability that the mesh is about to tangle there. The published two are one chain of blocks of
convolutions that shrink the mesh, and a head that restores the full size. The third, a U-Net, is
for small meshes: it also computes at full size, where the thin filaments of tangled zones are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import nn

STATE_CHANNELS = 18
BOTTOM = 32
"""The side of the mesh, in positions, behind all blocks of both published networks."""


@dataclass(frozen=True)
class Block:
    """A row of the table: one opening convolution, then 3x3 convolutions of stride 1.

    `filters` lists the output channels of every convolution of the block, `kernel` and
    `stride` belong to the opening one.
    """

    filters: tuple[int, ...]
    kernel: int = 3
    stride: int = 2


BLOCKS_1K = (
    Block((128, 256, 256, 256, 256), kernel=5),
    Block((384,) * 5),
    Block((512,) * 5),
    Block((384,) * 5),
    Block((384,) * 5),
    Block((128,) * 5, stride=1),
)

BLOCKS_2K = (
    Block((128,) * 3, kernel=5),
    Block((256,) * 3),
    Block((256,) * 3),
    Block((384,) * 3),
    Block((384,) * 3),
    Block((128,) * 3),
)


class MeshNetwork(nn.Module):
    """Base class: predicts the probability of tangling in every zone of a mesh.

    The network is fully convolutional: it takes any mesh whose sides are multiples of
    `total_stride`. Input (samples, 18, S, S), output (samples, 1, S, S) in [0, 1].
    """

    total_stride: int

    def check_mesh(self, height: int, width: int) -> None:
        """Raise `ValueError` unless this network takes a mesh of height x width zones."""
        stride = self.total_stride
        if height % stride or width % stride or not height or not width:
            nearest = [max(1, round(side / stride)) * stride for side in (height, width)]
            raise ValueError(
                f"a mesh of {height} x {width} zones does not fit this network: both sides must "
                f"be multiples of its total stride {stride}; the nearest is "
                f"{nearest[0]} x {nearest[1]}"
            )


class MeshTanglingNet(MeshNetwork):
    """A published network: a chain of blocks, and a head that shuffles channels into zones.

    Args:
        blocks: the table of the network, top row first.
        width: multiplies the channels of every block (rounded, at least one).
    """

    def __init__(self, blocks: tuple[Block, ...], width: float = 1.0) -> None:
        super().__init__()
        _check_width(width)
        self.total_stride = math.prod(block.stride for block in blocks)
        channels = STATE_CHANNELS
        layers = []
        for block in blocks:
            filters = [max(1, round(width * count)) for count in block.filters]
            layers.append(_block(channels, filters, block.kernel, block.stride))
            channels = filters[-1]
        self.blocks = nn.Sequential(*layers)
        # Every position of the small mesh stands for a patch of total_stride^2 zones. Shuffling its
        # channels into that patch keeps a zone on the rank that computed it; the published reshape
        # in memory order would scatter neighbours over the whole mesh.
        self.head = nn.Conv2d(channels, self.total_stride**2, kernel_size=1, bias=False)
        self.shuffle = nn.PixelShuffle(self.total_stride)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        """Map normalised states (samples, 18, S, S) to probabilities (samples, 1, S, S)."""
        self.check_mesh(*state.shape[2:])
        return torch.sigmoid(self.shuffle(self.head(self.blocks(state))))


class MeshUNet(MeshNetwork):
    """A U-Net of four levels with 16, 32, 64 and 128 channels: 485 K weights, total stride 8.

    Args:
        width: multiplies the channels of every level (rounded, at least one).
    """

    total_stride = 8

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        _check_width(width)
        levels = [max(1, round(width * channels)) for channels in (16, 32, 64, 128)]
        fine, coarse = levels[:-1], levels[1:]
        self.stem = _block(STATE_CHANNELS, [levels[0]] * 2, kernel=3, stride=1)
        self.down = nn.ModuleList(
            _block(above, [below] * 2, kernel=3, stride=2)
            for above, below in zip(fine, coarse, strict=True)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(below, above, kernel_size=2, stride=2)
            for above, below in zip(fine, coarse, strict=True)
        )
        self.join = nn.ModuleList(_block(2 * n, [n] * 2, kernel=3, stride=1) for n in fine)
        self.head = nn.Conv2d(levels[0], 1, kernel_size=1)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        """Map normalised states (samples, 18, S, S) to probabilities (samples, 1, S, S)."""
        self.check_mesh(*state.shape[2:])
        skips = [self.stem(state)]
        for down in self.down:
            skips.append(down(skips[-1]))
        x = skips.pop()
        for up, join in zip(reversed(self.up), reversed(self.join), strict=True):
            x = join(torch.cat([skips.pop(), up(x)], 1))
        return torch.sigmoid(self.head(x))


def mesh_tangling_1k(width: float = 1.0, size: int = 1024) -> MeshTanglingNet:
    """Return the network for 1024 x 1024 meshes: 31 convolutions, 34.4 M weights, total stride 32.

    `width` multiplies its channels; `size` scales it down to smaller meshes (see `scaled`).
    """
    return MeshTanglingNet(scaled(BLOCKS_1K, size), width)


def mesh_tangling_2k(width: float = 1.0, size: int = 2048) -> MeshTanglingNet:
    """Return the network for 2048 x 2048 meshes: 19 convolutions, 12.4 M weights, total stride 64.

    `width` multiplies its channels; `size` scales it down to smaller meshes (see `scaled`).
    """
    return MeshTanglingNet(scaled(BLOCKS_2K, size), width)


def mesh_unet(width: float = 1.0, size: int = 0) -> MeshUNet:
    """Return the U-Net, which is the same for meshes of any `size`. `width` multiplies channels."""
    return MeshUNet(width)


NETWORKS = {"1k": mesh_tangling_1k, "2k": mesh_tangling_2k, "unet": mesh_unet}


def scaled(blocks: tuple[Block, ...], size: int) -> tuple[Block, ...]:
    """Return the table for meshes of `size` x `size` zones; from the published size on it is
    `blocks`.

    On a smaller mesh the last blocks open with stride 1, so that the mesh shrinks to no fewer
    than the published 32 x 32 positions: each position covers the same fraction of the domain, in a
    patch of fewer zones.
    """
    stride, fitting = 1, []
    for block in blocks:
        opens = block.stride if BOTTOM * stride * block.stride <= size else 1
        stride *= opens
        fitting.append(replace(block, stride=opens))
    return tuple(fitting)


def _check_width(width: float) -> None:
    if not width > 0:
        raise ValueError(f"width={width} must be positive; 1.0 is the whole network")


def _block(channels: int, filters: list[int], kernel: int, stride: int) -> nn.Sequential:
    """Return layers: convolution, ReLU and batch norm, once per entry of `filters`."""
    layers: list[nn.Module] = []
    for count in filters:
        layers += [
            nn.Conv2d(channels, count, kernel, stride, padding=kernel // 2, bias=False),
            nn.ReLU(),
            nn.BatchNorm2d(count, eps=1e-5, momentum=0.1),
        ]
        channels, kernel, stride = count, 3, 1
    return nn.Sequential(*layers)
