"""Decoders of videos that go frame by frame, with the frames before in a cache, keep it cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import distconv as dc


class Causal(nn.Conv3d):
    """A convolution over the frame and two before it, which come from its cache."""

    def __init__(self, inward: int, outward: int):
        super().__init__(inward, outward, 3, padding=(0, 1, 1))
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the frames of `x` convolved, and keep the last two as they came."""
        before = self.cache
        if before is None:
            before = F.pad(x, (0, 0, 0, 0, 2, 0))[:, :, :2]
        joined = torch.cat([before, x], 2)
        self.cache = joined[:, :, -2:].clone()
        return super().forward(joined)


class Decoder(nn.Module):
    """Causal convolutions, group norm, and upsampling of each frame to twice its sides."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList([Causal(4, 8), Causal(8, 3)])
        self.norm = nn.GroupNorm(4, 8)

    def forward(self, z: Tensor) -> Tensor:
        """Map latents (N, 4, D, H, W) to a video (N, 3, D, 2 H, 2 W), frame by frame."""
        first, last = self.convolutions
        frames = []
        for frame in z.split(1, 2):
            x = F.silu(self.norm(first(frame)))
            x = F.interpolate(x, scale_factor=(1, 2, 2), mode="nearest")
            frames.append(last(x))
        return torch.cat(frames, 2)


@pytest.mark.parallel([2, 4])
def test_caches_stay_cut_and_frames_equal_serial() -> None:
    torch.manual_seed(0)
    z = torch.randn(1, 4, 4, 10, 12)
    serial = Decoder()
    expected = serial(z)
    grid = dc.ProcessGrid(height=2, width=-1)
    decoder = Decoder()
    decoder.load_state_dict(serial.state_dict())
    dc.parallelize(decoder, grid)
    dc.redistributions(reset=True)
    made = decoder(dc.distribute_tensor(z, grid))
    assert not dc.redistributions()
    torch.testing.assert_close(made.full_tensor(), expected)
    for one, other in zip(decoder.convolutions, serial.convolutions, strict=True):
        assert isinstance(one.cache, dc.DistTensor)
        assert one.cache.shard.numel() < other.cache.numel()
        torch.testing.assert_close(one.cache.full_tensor(), other.cache)
