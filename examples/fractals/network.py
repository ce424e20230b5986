"""The 3-D U-Net of the benchmark, for plain tensors too; its depth follows from the scale."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from distconv import Layout
from distconv.layers import GroupNorm

GROUPS = 8
"""The number of groups of each group norm."""

STATISTICS = ("global", "local")
"""The choices of statistics for group norms; see `distconv.layers.GroupNorm`."""


class UNet(nn.Module):
    """Predicts a score of each class for each voxel.

    Input (samples, 3, D, H, W), output (samples, classes, D, H, W), for sides of at least
    2^levels, of any size: maximum pooling drops odd planes, and upsampled volumes are padded to the
    size of their skip.

    Args:
        classes: the number of classes, background included.
        scale: the scale of the volumes, 2^scale voxels a side; there are `scale - 3` levels, at
            least one, each with half the side and twice the channels.
        channels: the channels at full resolution, a multiple of 8; the benchmark has 64.
        statistics: the statistics of group norms, "global" or "local", which is not exact.
        recompute: whether to keep only the input of each double convolution, and to compute it
            again in the backward pass.
    """

    def __init__(
        self,
        classes: int,
        scale: int,
        channels: int = 64,
        statistics: str = "global",
        recompute: bool = False,
    ) -> None:
        super().__init__()
        if channels < 1 or channels % GROUPS:
            raise ValueError(
                f"channels={channels} is not a multiple of {GROUPS}; the benchmark has 64"
            )
        levels = max(1, scale - 3)
        widths = [channels * 2**level for level in range(levels + 1)]
        self.recompute = recompute
        self.first = double_convolution(3, channels, statistics)
        self.down, self.upsample, self.up = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for above, below in zip(widths, widths[1:], strict=False):
            self.down.append(double_convolution(above, below, statistics))
            self.upsample.insert(0, nn.ConvTranspose3d(below, above, 2, stride=2))
            self.up.insert(0, double_convolution(2 * above, above, statistics))
        self.pool = nn.MaxPool3d(2)
        self.head = nn.Conv3d(channels, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map volumes to the scores of classes before the softmax."""
        x = self._run(self.first, x)
        skips = []
        for level in self.down:
            skips.append(x)
            x = self._run(level, self.pool(x))
        for upsample, level in zip(self.upsample, self.up, strict=True):
            skip = skips.pop()
            x = upsample(x)
            lacking = [n - m for n, m in zip(skip.shape[2:], x.shape[2:], strict=True)]
            if any(lacking):
                # torch pads the last dimension first; half of the padding is before, the rest
                # behind.
                x = F.pad(x, [n for d in reversed(lacking) for n in (d // 2, d - d // 2)])
            x = self._run(level, torch.cat([skip, x], 1))
        scores: Tensor = self.head(x)
        return scores

    def channel_layouts(self, deepest: int) -> dict[str, Layout]:
        """Return the `layouts` of `distconv.parallelize` that cut the deepest levels by channels.

        With `shard_parameters=True` a rank then holds one of as many parts of their weights as the
        grid has along `depth`; three levels have 98% of all weights.

        Args:
            deepest: the number of levels, counted from the lowest.
        """
        names = [f"down.{len(self.down) - 1 - i}" for i in range(deepest)]
        names += [f"{part}.{i}" for part in ("upsample", "up") for i in range(deepest)]
        return dict.fromkeys(names, Layout(channel="depth", height="height", width="width"))

    def _run(self, block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if not (self.recompute and torch.is_grad_enabled()):
            return block(x)
        result: Tensor = checkpoint(block, x, use_reentrant=False)
        return result


def double_convolution(inputs: int, outputs: int, statistics: str) -> nn.Sequential:
    """Return two 3^3 convolutions, each with group norm and ReLU."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [
            nn.Conv3d(channels, outputs, 3, padding=1, bias=False),
            GroupNorm(GROUPS, outputs, statistics=statistics),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)
