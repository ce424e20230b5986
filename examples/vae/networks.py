"""The autoencoders of `diffusers`, with the widths of their published models and random weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import diffusers
import torch
from torch import Tensor, nn

_LEVELS = 4
_RESIDUAL, _ATTENTION = ("ResBlock",) * 3, ("EfficientViTBlock",) * 3
_STAGES = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in {
        "block_types": _RESIDUAL + _ATTENTION,
        "qkv_multiscales": ((), (), (), (5,), (5,), (5,)),
        "block_out_channels": (128, 256, 512, 512, 1024, 1024),
    }.items()
}


class Autoencoder(NamedTuple):
    """An autoencoder of images or of videos.

    Attributes
    ----------
    name: the name of its class in diffusers.
    channels: the channels of a latent.
    pixels: the pixels along each side of the patch that one latent stands for.
    options: the published model's arguments that are not defaults.
    frames: the fewest frames of latents; None for images.
    """

    name: str
    channels: int
    pixels: int
    options: Mapping[str, Any] = {}  # noqa: RUF012
    frames: int | None = None

    def build(self) -> nn.Module:
        """Return the network, with the same random weights each time."""
        torch.manual_seed(0)
        network: nn.Module = getattr(diffusers, self.name)(**self.options)
        return network.eval().requires_grad_(False)

    def latents(self, size: int) -> Tensor:
        """Return random latents of an image, or of frames, of `size` x `size` pixels."""
        side = size // self.pixels
        frames = () if self.frames is None else (self.frames,)
        return torch.randn(1, self.channels, *frames, side, side, generator=_seeded())


def decoded(network: Any, latents: Tensor) -> Tensor:
    """Return the images of latents."""
    made: Tensor = network.decode(latents).sample
    return made


def encoded(network: Any, images: Tensor) -> Tensor:
    """Return the latents of images; the mode, where the network returns a distribution."""
    found = network.encode(images)
    made: Tensor = found.latent if hasattr(found, "latent") else found.latent_dist.mode()
    return made


def tile(network: Any, autoencoder: Autoencoder, size: int) -> None:
    """Let diffusers decode in tiles of `size` x `size` pixels, overlapping by a quarter."""
    network.enable_tiling()
    kinds: dict[str, float] = {
        "sample_min": size,
        "sample_stride": size * 3 // 4,
        "latent_min": size // autoencoder.pixels,
    }
    ways = ("size", "height", "width")
    options = {f"tile_{kind}_{way}": value for kind, value in kinds.items() for way in ways}
    options |= {f"tile_overlap_factor{way}": 0.25 for way in ("", "_height", "_width")}
    for name, value in options.items():
        if hasattr(network, name):  # the names differ from class to class
            setattr(network, name, value)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


AUTOENCODERS = (
    Autoencoder(
        "AutoencoderKL",
        *(4, 8),
        {
            "block_out_channels": (128, 256, 512, 512),
            "down_block_types": ("DownEncoderBlock2D",) * _LEVELS,
            "up_block_types": ("UpDecoderBlock2D",) * _LEVELS,
            "layers_per_block": 2,
        },
    ),
    Autoencoder(
        "AutoencoderDC",
        *(32, 32),
        {
            **_STAGES,
            "encoder_layers_per_block": (0, 4, 8, 2, 2, 2),
            "decoder_layers_per_block": (0, 5, 10, 2, 2, 2),
            "downsample_block_type": "pixel_unshuffle",
        },
    ),
    Autoencoder("AutoencoderKLWan", *(16, 8), frames=3),
    Autoencoder("AutoencoderKLQwenImage", *(16, 8), frames=1),
    Autoencoder("AutoencoderKLCogVideoX", *(16, 8), frames=2),
    Autoencoder("AutoencoderKLHunyuanVideo", *(16, 8), frames=2),
    Autoencoder("AutoencoderKLLTXVideo", *(128, 32), frames=2),
    Autoencoder("AutoencoderKLMochi", *(12, 8), frames=2),
)
"""Widths and depths are of Stable Diffusion, DC-AE f32c32, Wan 2.1, Qwen-Image, CogVideoX,
HunyuanVideo, LTX-Video and Mochi 1."""
